"""Stand-ins for functions of fbgemm that its libraries for the CPU do not have, for the mock device."""

import functools

import torch


@functools.cache
def fbgemm_gradients():
    """Registers the gradients for CUDA of ops of fbgemm; its libraries for the CPU do not have them."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::permute_pooled_embs_split", "CUDA"):
        return None
    kernels = torch.library.Library("fbgemm", "IMPL")
    kernels.impl("permute_pooled_embs_auto_grad_split", _Permuted.apply, "AutogradCUDA")
    kernels.impl("batch_index_select_dim0", _select_rows, "AutogradCUDA")
    return kernels  # kept: they are dropped with it


def _select_rows(
    inputs, indices, input_num_indices, input_rows, input_columns, permute_output_dim_0_1=False
):
    """As the op of fbgemm: rows of several matrices that lie in one tensor."""
    sizes = [rows * columns for rows, columns in zip(input_rows, input_columns, strict=True)]
    parts = zip(inputs.split(sizes), indices.split(input_num_indices), input_columns, strict=True)
    selected = [part.view(-1, columns)[places] for part, places, columns in parts]
    if permute_output_dim_0_1:
        return torch.cat(selected, 1).flatten()
    return torch.cat([one.flatten() for one in selected])


class _Permuted(torch.autograd.Function):
    """Pooled embeddings in another order."""

    @staticmethod
    def forward(ctx, pooled, *order):
        ctx.order = order
        return torch.ops.fbgemm.permute_pooled_embs_split(pooled, *order)

    @staticmethod
    def backward(ctx, grad):
        widths, places, inverse_widths, inverse_places = ctx.order
        permute = torch.ops.fbgemm.permute_pooled_embs_split
        order = inverse_widths, inverse_places, widths, places
        return permute(grad.contiguous(), *order), None, None, None, None


def select_segments(
    values, lengths, offsets, indices, batch_size, weights=None, selected_lengths_sum=None
):
    """As the op of fbgemm, for one key."""
    assert batch_size == len(lengths)
    lengths, *selected = torch.ops.fbgemm.permute_1D_sparse_data(
        indices, lengths, values, weights, selected_lengths_sum
    )
    return [selected[0], lengths, *(selected[1:] if weights is not None else [])]
