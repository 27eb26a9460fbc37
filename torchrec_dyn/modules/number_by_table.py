"""An integer option of a collection: one for all tables, or one by table name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def number_by_table(
    given: int | Mapping[str, int], names: Sequence[str], most: Mapping[str, int], where: str
) -> dict[str, int]:
    """Gives every table its number.

    Args:
        given: one number for all tables, or a mapping with one for each of them.
        names: the tables of the collection.
        most: the largest number each table may have.
        where: collection and option, for messages.

    Raises:
        ValueError: if a table has none, a name is no table, or a number is out of [1, most].
    """
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ValueError(
                f"{where}: expected a number for each of the tables {list(names)}, got "
                f"{sorted(given)}."
            )
        chosen = {name: given[name] for name in names}
    else:
        chosen = dict.fromkeys(names, given)
    for name, number in chosen.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most[name]:
            raise ValueError(
                f"{where}: expected an integer in [1, {most[name]}] for table '{name}', got "
                f"{number!r}."
            )
    return chosen
