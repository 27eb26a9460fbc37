"""The extension: importing it registers torch.ops.torchrec_dyn. It holds no names."""
