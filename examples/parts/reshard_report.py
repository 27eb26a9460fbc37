"""The report of save_and_reshard.py: loss curves side by side, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WINDOW = 10  # steps per line


def as_text(
    curves: Mapping[str, Sequence[float]],
    plans: Mapping[str, str],
    changed: Mapping[str, Sequence[str]],
    is_kept: bool,
    saved_at: int,
) -> str:
    """Returns the report.

    Args:
        curves: losses of each run. The first run, which is not moved, has losses of all steps; the other runs
            have losses from `saved_at` on.
        plans: plan of each run.
        changed: for each moved run, names of the tensors whose saved numbers differ from the loaded numbers.
        is_kept: True if torch.save and torch.load of the laptop's model kept it.
        saved_at: the step before which the checkpoint was saved.
    """
    stays, *moved = curves
    whole = {
        name: [None] * (len(curves[stays]) - len(one)) + [*one] for name, one in curves.items()
    }
    lines = ["mean loss of", "steps       " + "".join(f"{name:>21}" for name in curves)]
    for begin in range(0, len(curves[stays]), WINDOW):
        if begin == saved_at:
            lines.append(f"-- saved by {stays}, loaded by the others")
        cells = [mean_of(one[begin : begin + WINDOW]) for one in whole.values()]
        lines.append(
            f"{begin:3} to {begin + WINDOW - 1:3}  " + "".join(f"{cell:>21}" for cell in cells)
        )
    after = curves[stays][saved_at:]
    lines.append(
        f"\nThe {len(after)} losses after the move, beside those of {stays} ({plans[stays]}):"
    )
    for name in moved:
        apart = max(abs(a - b) for a, b in zip(after, curves[name], strict=True))
        equal = sum(a == b for a, b in zip(after, curves[name], strict=True))
        how = "all equal to the last bit" if equal == len(after) else f"at most {apart:.1e} apart"
        lines.append(f"  {name:20} {plans[name] or 'not sharded':34} {how}")
    lines.append("\nSaved again at once after loading:")
    for name in moved:
        kept = ", ".join(changed[name])
        lines.append(
            f"  {name:20} {f'other numbers in {kept}' if kept else 'every tensor as it was, to the last bit'}"
        )
    lines.append(
        "torch.save and torch.load of the laptop's model: "
        + ("the same predictions" if is_kept else "OTHER predictions")
    )
    return "\n".join(lines)


def mean_of(losses: Sequence[float | None]) -> str:
    """Returns the formatted mean of losses, "" if there are no losses."""
    known = [one for one in losses if one is not None]
    return f"{sum(known) / len(known):.6f}" if known else ""
