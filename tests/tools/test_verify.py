"""`python -m torchrec_dyn verify`: checkpoints, deltas and files of rows, whole and damaged."""

import io
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_damage import items_of
from saved_cases import save_dict
from torch.serialization import get_crc32_options, set_crc32_options
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import __main__ as command_line
from torchrec_dyn.checkpoint import (
    export_delta,
    export_rows,
    export_saved_rows,
    import_rows,
    mark,
)
from torchrec_dyn.tools import inspection

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def collection() -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(1000, 4, "t", feature_names=["f"])
    learning = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1}
    return dyn.DynamicEmbeddingBagCollection([config], fused_params=learning)


def train(ebc: dyn.DynamicEmbeddingBagCollection, first: int) -> None:
    features = KeyedJaggedTensor(
        ["f"], torch.arange(first, first + 40), lengths=torch.ones(40, dtype=torch.int64)
    )
    ebc(features).values().sum().backward()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ebc = collection()
    train(ebc, 0)
    marker = mark(ebc)
    state = {
        "model": ebc.state_dict(),
        "optimizer": ebc.fused_optimizer.state_dict(),
        "dense": {"weight": torch.randn(30)},
    }
    save_dict(state, folder / "checkpoint")
    train(ebc, 20)
    export_delta(ebc, folder / "delta", since=marker)
    export_rows(ebc, "t", folder / "rows.safetensors", checksum=True)
    return folder


def verify(path: Path, capsys) -> tuple[int, str]:
    status = command_line.main(["verify", str(path)])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_whole_files(saved, capsys):
    status, told = verify(saved / "checkpoint", capsys)
    assert status == 0 and "1 dynamic tables" in told and told.endswith("no damage\n"), told
    status, told = verify(saved / "delta", capsys)
    assert status == 0 and told.startswith("delta") and told.endswith("no damage\n"), told
    status, told = verify(saved / "rows.safetensors", capsys)
    assert status == 0 and "60 rows" in told and "no damage" in told, told
    status, told = verify(saved / "none", capsys)
    assert status == 1 and "got no directory" in told
    status, told = verify(saved, capsys)
    assert status == 1 and "got a directory without .metadata" in told


def test_entries_without_a_crc_are_told(tmp_path, capsys):
    """Rows have sums of their own, other entries nothing then."""
    ebc = collection()
    train(ebc, 0)
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        state = {"model": ebc.state_dict(), "bare": torch.rand(3)}
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    finally:
        set_crc32_options(before)
    told = verify(tmp_path, capsys)[1]
    assert (
        told.rstrip().endswith("no damage, but 3 entries have no CRC") and "3 other entries" in told
    )


def test_every_flipped_bit_of_an_entry_of_an_archive():
    """Of its flags and sizes in the directory: zipfile raises many kinds of errors; each is damage."""
    written = io.BytesIO()
    torch.save(torch.arange(3), written)
    whole = written.getvalue()
    told, begin = "", whole.index(b"PK\x01\x02")
    for bit in range(8 * begin, 8 * whole.index(b"PK\x01\x02", begin + 1)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            inspection._is_checked("one", io.BytesIO(damaged))
        except ValueError as error:
            told += str(error)
    for kind in ("RuntimeError", "error", "BadZipFile", "NotImplementedError"):
        assert f"got {kind}: " in told, told


@pytest.mark.parametrize("name", ["checkpoint", "delta"])
def test_every_flipped_number_of_a_checkpoint(saved, name, capsys):
    """Of dynamic tables and of all else."""
    chance, seen = random.Random(name), set()
    for item in items_of(saved / name):
        path = saved / name / item.file
        whole = path.read_bytes()
        for _ in range(2):
            place = item.begin + chance.randrange(item.numbers.nbytes)
            damaged = bytearray(whole)
            damaged[place] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            status, told = verify(saved / name, capsys)
            assert status == 1 and "damaged" in told, (item.key, told)
        path.write_bytes(whole)
        seen.add(item.key)
    assert len(seen) > 5 and ("dense.weight" in seen) == (name == "checkpoint")
    assert verify(saved / name, capsys)[0] == 0


def test_every_flipped_bit_of_rows(saved, capsys):
    """Of the numbers: an error. Of the header: an error, or the same rows."""
    path, chance = saved / "rows.safetensors", random.Random(0)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    expected = collection()
    import_rows(expected, "t", path)
    ids = torch.arange(60)
    expected_rows, _ = expected.table("t").lookup(ids)
    for place in [*range(0, begin, 3), *(chance.randrange(begin, len(whole)) for _ in range(60))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        status, _ = verify(path, capsys)
        other = collection()
        try:
            import_rows(other, "t", path)
        except ValueError:
            assert other.table("t").num_rows == 0
            assert status == 1, place
        else:
            assert place < begin
            assert torch.equal(other.table("t").lookup(ids)[0], expected_rows), place
    path.write_bytes(whole)
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"the content sum \w+ of weight, got \w+\. The file is"):
        import_rows(collection(), "t", path)
    path.write_bytes(whole)


def test_a_file_without_a_sum_is_imported_but_not_verified(saved, tmp_path, capsys):
    whole = (saved / "rows.safetensors").read_bytes()
    start = whole.find(b'"content_sums":"')
    removed = whole[start - 1 : start + len(b'"content_sums":"') + 34]
    assert removed.startswith(b',"')
    path = tmp_path / "f"  # spaces keep the length of the header
    path.write_bytes(whole.replace(removed, b" " * len(removed)))
    assert import_rows(collection(), "t", path) == 60
    status, told = verify(path, capsys)
    assert status == 1 and "expected a file with content sums" in told


def test_both_exports_write_the_same_sum(saved, tmp_path):
    ebc = collection()
    train(ebc, 0)
    export_rows(ebc, "t", tmp_path / "one", checksum=True)
    export_saved_rows(saved / "checkpoint", "t", tmp_path / "other", checksum=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
