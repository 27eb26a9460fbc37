"""Tables that are loaded under another name than they were saved under.

The content sums and the config of a saved table contain its name. So a load reads it under the saved name,
and only its keys are renamed. In a state dict the configs carry the saved name as a mark, in memory only.

A key is "<path>.<table>.<tensor>" in the model's state dict, and "<path>.<table>.weight.<table>.<tensor>" in
the optimizer's.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format.content_sums import MODEL_CHECKSUM, OPTIMIZER_CHECKSUM
from torchrec_dyn.checkpoint_format.saved_tensor import SavedTensor
from torchrec_dyn.name_lists import listed

_MARK = "saved_as"  # in a config in memory; no saved config has it
_ENDS = {"config": MODEL_CHECKSUM, "optimizer_config": OPTIMIZER_CHECKSUM}


def checked_rename(rename: object, where: str) -> dict[str, str]:
    """Returns the new names of tables by their saved names; None: no table has another name."""
    if rename is None:
        return {}
    names = [*rename.items()] if isinstance(rename, Mapping) else [(rename, None)]
    if any(not isinstance(name, str) for pair in names for name in pair):
        raise ValueError(
            f"{where}: expected a dict of new names of tables by their saved names, got {rename!r}. Write "
            "{'saved': 'new'}."
        )
    given = dict(names)
    if twice := sorted({new for new in given.values() if [*given.values()].count(new) > 1}):
        raise ValueError(
            f"{where}: expected a new name for one saved table, got {listed(twice)} for several. Give each "
            "table a name of its own."
        )
    return given


def check_new_names(rename: Mapping[str, str], tables: Iterable[str], where: str) -> None:
    """Raises ValueError if a new name is not that of a table that is loaded."""
    own = sorted(set(tables))
    if wrong := sorted(set(rename.values()) - set(own)):
        raise ValueError(
            f"{where}: expected new names among the tables {listed(own)} that are loaded, got "
            f"{listed(wrong)}. Write {{'saved': 'new'}}."
        )


def check_saved_names(rename: Mapping[str, str], tables: Iterable[str], where: str) -> None:
    """Raises ValueError if a name was not saved, or a new one is that of another saved table."""
    saved = set(tables)
    if wrong := sorted(rename.keys() - saved):
        raise ValueError(
            f"{where}: expected names among the saved tables {listed(sorted(saved))}, got {listed(wrong)}. "
            "Write {'saved': 'new'}."
        )
    if clashes := sorted(set(rename.values()) & (saved - rename.keys())):
        raise ValueError(
            f"{where}: expected new names that no other saved table has, got {listed(clashes)}. Rename "
            "these too."
        )


def renamed_keys(saved: Mapping[str, Any], rename: Mapping[str, str], where: str) -> dict[str, str]:
    """Returns the new keys of the tensors of renamed tables, by their keys in a checkpoint."""
    if not rename:
        return {}
    prefixes = [*_prefixes(saved)]
    check_saved_names(rename, map(_last, prefixes), where)
    new = {one: _renamed(one, rename) for one in prefixes if _last(one) in rename}
    keys = {}
    for key in saved:
        prefix, _, name = key.rpartition(".")
        if prefix in new:
            keys[key] = f"{new[prefix]}.{name}"
    return keys


def rename_tables(state_dict: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Returns a state dict in which tables have other names, to load it into a model with these names.

    Rows, optimizer state, scores, counters and clocks load as they were saved, and are verified as always. An
    id that is new after the load gets the initial row of the new name. The tensors are not copied. Load the
    result into a model or an optimizer; do not save it.

    Args:
        state_dict: of a model, a collection or an optimizer, or a dict of several of these, with plain
            tensors, as that of an unsharded collection. The model that loads it may be sharded.
        rename: new names by saved names. Names may be swapped.

    Raises:
        ValueError: if a name is not that of a dynamic table of the state dict, two tables would get one name,
            or the state dict is that of a sharded collection.
    """
    where = "rename_tables"
    given = checked_rename(rename, f"{where}.rename")
    check_saved_names(given, set(_names_in(state_dict)), f"{where}.rename")
    parameters = dict(_parameters(state_dict, given))
    renamed: dict[str, Any] = _with_names(state_dict, given, parameters)
    return renamed


def marked(config: Tensor, saved_name: str) -> Tensor:
    """Returns a config [n] uint8 with the name under which its table was saved."""
    if isinstance(config, SavedTensor):
        raise ValueError(
            f"rename_tables: expected plain tensors, as of an unsharded collection, got those of table "
            f"{saved_name!r} of a sharded one. Load what dcp.save wrote, with LoadPlanner(rename=...)."
        )
    fields = _fields(config)
    return _as_tensor({_MARK: saved_name, **fields}) if fields else config


def without_mark(config: Tensor) -> tuple[Tensor, str | None]:
    """Returns a config as it was saved, and the name under which its table was; None if it has no mark."""
    fields = _fields(config)
    name = fields.pop(_MARK, None)
    return (config, None) if name is None else (_as_tensor(fields), str(name))


def _fields(config: Tensor) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(config.tolist()))
    except (ValueError, TypeError, RecursionError):  # damaged: the load says so
        return {}
    return fields if isinstance(fields, dict) else {}


def _as_tensor(fields: Mapping[str, Any]) -> Tensor:
    text = json.dumps(fields, sort_keys=True).encode()  # as `saved_config.to_bytes`
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _last(prefix: str) -> str:
    return prefix.rpartition(".")[2]


def _prefixes(keys: Iterable[Any]) -> Iterator[str]:
    """Yields what is before the names of the tensors of a table, or of its optimizer state."""
    known = {key for key in keys if isinstance(key, str)}
    for key in known:
        prefix, _, name = key.rpartition(".")
        if name in _ENDS and prefix and f"{prefix}.{_ENDS[name]}" in known:
            yield prefix


def _renamed(prefix: str, rename: Mapping[str, str]) -> str:
    """Returns "<path>.new" of "<path>.old", and "<path>.new.weight.new" of "<path>.old.weight.old"."""
    words = prefix.split(".")
    old, new = words[-1], rename[words[-1]]
    if words[-3:] == [old, "weight", old]:
        words[-3] = new
    return ".".join([*words[:-1], new])


def _names_in(state: Any) -> Iterator[str]:
    """Yields the names of the tables in a state dict, of which there may be several inside."""
    if isinstance(state, Mapping):
        yield from map(_last, _prefixes(state))
        for value in state.values():
            yield from _names_in(value)


def _parameters(state: Any, rename: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the old and the new name of each parameter of a renamed table in the state of an optimizer."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        for prefix in _prefixes(value) if isinstance(value, Mapping) else ():
            whole = _renamed(f"{key}.{prefix}", rename) if prefix in rename else ""
            if whole and f".{key}".endswith(f".{prefix}.weight"):
                yield key, whole.rpartition(".")[0]
        yield from _parameters(value, rename)


def _keys_here(state: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, str]:
    """Returns the new keys of tensors that are in a part of a state dict, which may lack some tables."""
    here = {*map(_last, _prefixes(state))} & rename.keys()
    return renamed_keys(state, {name: rename[name] for name in here}, "rename_tables")


def _with_names(state: Any, rename: Mapping[str, str], parameters: Mapping[str, str]) -> Any:
    """Returns a part of a state dict with new names: keys, marked configs, and names of parameters."""
    if isinstance(state, str):  # the name of a parameter, in a group
        return parameters.get(state, state)
    if isinstance(state, list):
        return [_with_names(value, rename, parameters) for value in state]
    if not isinstance(state, Mapping):
        return state
    renamed: OrderedDict[Any, Any] = OrderedDict()
    keys = _keys_here(state, rename)
    for key, value in state.items():
        if key in keys and _last(key) in _ENDS:
            value = marked(value, key.split(".")[-2])
        new = parameters.get(key, key) if isinstance(value, Mapping) else keys.get(key, key)
        renamed[new] = _with_names(value, rename, parameters)
    if hasattr(state, "_metadata"):  # of torch's modules
        renamed._metadata = state._metadata  # type: ignore[attr-defined]
    return renamed
