"""RowOptimizer: the update rule of rows, read from TorchRec's `fused_params`.

`RULES` is the only list of optimizers in Python. csrc/lookup/row_update.h has their arithmetic and repeats
what a rule says of itself; tests/ops/test_optimizer_states.py compares both.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from torchrec_dyn.row_rules import LarsSGD, Lion, RowRule, RuleState


class OptimizerKind(enum.IntEnum):
    """Names of the update rules of the core: those of FBGEMM's EmbOptimType, ADAMW, FTRL and ADAM_BY_ROW.

    ADAM_BY_ROW is ADAM with `use_rowwise_bias_correction`. LARS_SGD and LION name rules in Python:
    `dyn.LarsSGD` and `dyn.Lion`.
    """

    EXACT_SGD = 0
    EXACT_ADAGRAD = 1
    EXACT_ROWWISE_ADAGRAD = 2
    ADAM = 3
    PARTIAL_ROWWISE_ADAM = 4
    ADAMW = 5
    FTRL = 6
    LAMB = 7
    PARTIAL_ROWWISE_LAMB = 8
    ADAM_BY_ROW = 9


class Rule(NamedTuple):
    """An update rule of the core, of a `number` in csrc/lookup/row_update.h.

    `hyper` are the fields of `RowOptimizer` behind the learning rate, in the order of the rule's struct
    there. Of the `states`, those of `rowwise` have one number per row, and `sums` begin with
    `initial_accumulator_value`.
    """

    number: int
    hyper: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()
    counts_steps: bool = False
    sums: tuple[str, ...] = ()


# The states of all rules. Their order is that of their content sums in checkpoints: new names come last.
STATE_NAMES = ("momentum1", "momentum2", "row_counter")
STATE_DTYPE = torch.float32  # for rows of any dtype

_FIRST, _BOTH = STATE_NAMES[:1], STATE_NAMES[:2]
_ADAM = Rule(3, ("eps", "beta1", "beta2", "weight_decay"), _BOTH, counts_steps=True)
_PARTIAL_ROWWISE_ADAM = _ADAM._replace(number=4, rowwise=("momentum2",))
RULES = {
    OptimizerKind.EXACT_SGD: Rule(0),
    OptimizerKind.EXACT_ADAGRAD: Rule(1, ("eps",), _FIRST, sums=_FIRST),
    OptimizerKind.EXACT_ROWWISE_ADAGRAD: Rule(
        2, ("eps", "weight_decay", "weight_decay_mode", "max_norm"), _FIRST, _FIRST, sums=_FIRST
    ),
    OptimizerKind.ADAM: _ADAM,
    OptimizerKind.PARTIAL_ROWWISE_ADAM: _PARTIAL_ROWWISE_ADAM,
    OptimizerKind.ADAMW: _ADAM,
    OptimizerKind.FTRL: Rule(5, ("l1", "l2"), _BOTH, sums=_FIRST),
    OptimizerKind.LAMB: _ADAM._replace(number=6),
    OptimizerKind.PARTIAL_ROWWISE_LAMB: _PARTIAL_ROWWISE_ADAM._replace(number=7),
    OptimizerKind.ADAM_BY_ROW: Rule(8, _ADAM.hyper, (*_BOTH, "row_counter"), ("row_counter",)),
}

# By their names in TorchRec's DataType and in FBGEMM's SparseType.
_OUTPUT_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}

# FBGEMM's WeightDecayMode by number. Its other modes need state that these tables do not have.
_DECAY_MODES = {0: "NONE", 1: "L2", 2: "DECOUPLE"}

# Defaults in `fused_params` that are not FBGEMM's.
_DEFAULTS: Mapping[OptimizerKind, Mapping[str, Any]] = {
    # as in torch.optim.AdamW and in ReCIS
    OptimizerKind.ADAMW: {"learning_rate": 1.0e-3, "weight_decay": 1.0e-2},
    OptimizerKind.FTRL: {"initial_accumulator_value": 0.1},  # as in TensorFlow
}

# What to do about a key that is not ours, where it is not just to remove it.
_REMEDIES = {"lr": "Write learning_rate.", "betas": "Write beta1 and beta2."}

# Keys that a rule in Python takes beside its own hyper-parameters.
_OF_ANY_RULE = {"own", "learning_rate", "defer_updates", "gradient_clipping", "max_gradient"}

# Rules in Python by their names in FBGEMM's EmbOptimType and TorchRec's OptimType, with the keys of
# `fused_params` that are arguments of their constructors.
_NAMED_RULES: Mapping[str, tuple[type[RowRule], tuple[str, ...]]] = {
    "LARS_SGD": (LarsSGD, ("eta", "momentum", "weight_decay")),
    "LION": (Lion, ("beta1", "beta2", "weight_decay")),
}

# All names that `fused_params["optimizer"]` may have.
OPTIMIZER_NAMES = (*OptimizerKind.__members__, *_NAMED_RULES)

_LEAST_EPS = torch.finfo(torch.float32).tiny  # smaller numbers become 0, or overflow as divisors

# Keys for FBGEMM's cache of rows and for other places of rows. They have no effect; collections warn of them.
PLACEMENT_KEYS = frozenset(
    {
        "cache_algorithm",
        "cache_assoc",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "cache_sets",
        "enforce_hbm",
        "gather_uvm_cache_stats",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "record_cache_metrics",
        "uvm_host_mapped",
        "uvm_non_rowwise_momentum",
    }
)


@dataclass(frozen=True)
class RowOptimizer:
    """An update rule and its hyper-parameters, with FBGEMM's defaults.

    ADAMW is the rule of FBGEMM's ADAM, with torch's name and torch's defaults (docs/dev/decisions/0019).
    ADAM_BY_ROW counts the updates of each row (`row_counter`) in place of the table's steps, so its bias
    correction is the same for early and late rows.

    Source: fbgemm_gpu/split_table_batched_embeddings_ops_training.py (defaults),
    fbgemm_gpu/codegen/genscript/optimizers.py (rules, see csrc/lookup/row_update.h).

    Attributes:
        initial_accumulator_value: the sums of squares (`Rule.sums`) of a new row.
        l1: strength of FTRL's L1 regularization; `l2` is that of its L2 regularization.
        max_norm: the largest norm of the columns of a row in a table after its update; 0: no limit.
        gradient_clipping: True to clamp the gradient of the outputs to [-max_gradient, max_gradient].
        own: a rule in Python. The core then only sums the gradients, by EXACT_SGD, which is then the `kind`.
        defer_updates: True if the fused optimizer's `step()` updates the rows, and not backward.
    """

    kind: OptimizerKind = OptimizerKind.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1.0e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    initial_accumulator_value: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    max_norm: float = 0.0
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    defer_updates: bool = False
    own: RowRule | None = None

    @property
    def rule(self) -> int:
        """Number of the rule in csrc/lookup/row_update.h."""
        return RULES[self.kind].number

    @property
    def saved_name(self) -> str:
        """The name in checkpoints. Optimizers with the same name have the same states."""
        if self.own is None:
            return self.kind.name.lower()
        states = (
            f"{name} ({'a number per row' if state.rowwise else 'a number per column'})"
            for name, state in self.own.states.items()
        )
        return f"{self.own.name} with {', '.join(states) or 'no state'}"

    @property
    def state_names(self) -> tuple[str, ...]:
        """FBGEMM's names of the optimizer states."""
        return self._rule.states

    @property
    def state_is_rowwise(self) -> tuple[bool, ...]:
        """For each of `state_names`: True if it has one number per row, False if one number per column."""
        return tuple(map(self.is_rowwise, self.state_names))

    def is_rowwise(self, name: str) -> bool:
        """Returns True for a state with one number per row; False for any other name, as "weight"."""
        return name in self._rule.rowwise

    @property
    def _rule(self) -> Rule:
        if self.own is None:
            return RULES[self.kind]
        own = dict(zip(_BOTH, self.own.states.values(), strict=False))
        rowwise = tuple(name for name, state in own.items() if state.rowwise)
        return Rule(-1, (), tuple(own), rowwise, counts_steps=True)

    @property
    def initial_states(self) -> tuple[float, ...]:
        """For each of `state_names`: the initial number in each column of a new row."""
        if self.own is not None:
            return tuple(state.initial for state in self.own.states.values())
        rule = self._rule
        return tuple(
            self.initial_accumulator_value if name in rule.sums else 0.0 for name in rule.states
        )

    @property
    def counts_steps(self) -> bool:
        """True if updates depend on the number of training steps so far."""
        return self._rule.counts_steps

    def state_columns(self, columns: int) -> tuple[int, ...]:
        """Returns the number of columns of each optimizer state for rows of `columns` columns."""
        return tuple(1 if rowwise else columns for rowwise in self.state_is_rowwise)

    def hyper(self, learning_rate: float) -> list[float]:
        """Returns the hyper-parameters of `ops.update_rows_` at the current learning rate."""
        names = self._rule.hyper
        return [learning_rate, *(float(getattr(self, name)) for name in names)]

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any], where: str) -> RowOptimizer:
        """Returns the rule and hyper-parameters of TorchRec's `fused_params`."""
        chosen: dict[str, Any] = {}
        for key, value in _with_named_rule(fused_params, where).items():
            if key == "optimizer" and isinstance(value, RowRule):
                chosen["own"] = _checked_rule(value, where)
            elif key == "optimizer":
                chosen["kind"] = _kind(value, where)
            elif key == "output_dtype":
                output_dtype_of(fused_params, where)
            elif key in _READERS:
                chosen[key] = _READERS[key](key, value, where)
            elif key not in _WITHOUT_EFFECT:
                raise ValueError(
                    f"fused_params of {where}: expected a key among optimizer, "
                    f"{', '.join(_NUMBERS)}, weight_decay_mode, gradient_clipping, defer_updates, "
                    "use_rowwise_bias_correction, output_dtype, "
                    f"got {key!r}. {_REMEDIES.get(key, 'Remove it.')}"
                )
        chosen.pop("stochastic_rounding", None)
        if chosen.pop("use_rowwise_bias_correction", False):
            chosen["kind"] = _by_row(chosen, where)
        chosen = {**_DEFAULTS.get(chosen.get("kind", cls.kind), {}), **chosen}
        optimizer = cls(**chosen)
        optimizer._check_own(chosen, where)
        optimizer._check_decay(where)
        optimizer._check_options(where)
        if "max_gradient" in chosen and "gradient_clipping" not in chosen:
            raise ValueError(
                f"fused_params of {where}: expected gradient_clipping=True with max_gradient, got "
                f"max_gradient = {optimizer.max_gradient} alone. Add gradient_clipping=True, or remove it."
            )
        return optimizer

    def _check_own(self, chosen: Mapping[str, Any], where: str) -> None:
        if self.own is not None and (others := {*chosen} - _OF_ANY_RULE):
            raise ValueError(
                f"fused_params of {where}: expected the hyper-parameters of {self.own!r} in its constructor, "
                f"got {', '.join(sorted(others))}. Remove them from fused_params."
            )

    def _check_options(self, where: str) -> None:
        rule = self._rule
        # A rule divides by eps where a row has had no gradient but zeros: 0 / 0 is NaN.
        if "eps" in rule.hyper and self.eps < _LEAST_EPS:
            raise ValueError(
                f"fused_params of {where}: expected eps of at least {_LEAST_EPS:.2g} with {self.kind.name}, "
                f"got {self.eps}, with which a gradient of zeros makes a new row NaN. Leave eps out for the "
                "default, 1e-08."
            )
        for key in ("initial_accumulator_value", "l1", "l2", "max_norm"):
            value = getattr(self, key)
            has_it = key in rule.hyper or (key == "initial_accumulator_value" and rule.sums)
            if value != 0.0 and not has_it:
                raise ValueError(
                    f"fused_params of {where}: expected {key} = 0 with {self.kind.name}, whose rule does "
                    f"not have it, got {value}. Remove it."
                )
        if self.gradient_clipping and self.max_gradient == 0.0:
            raise ValueError(
                f"fused_params of {where}: expected max_gradient > 0, got 0.0, with which no row would "
                "learn. Freeze the tables instead."
            )

    def _check_decay(self, where: str) -> None:
        if self.kind == OptimizerKind.ADAMW and _DECAY_MODES[self.weight_decay_mode] == "L2":
            raise ValueError(
                f"fused_params of {where}: expected a weight_decay_mode of DECOUPLE or none with ADAMW, "
                "whose decay is decoupled, got L2. Remove it."
            )
        if self.weight_decay == 0.0:
            return
        if "weight_decay" not in self._rule.hyper:
            raise ValueError(
                f"fused_params of {where}: expected weight_decay = 0 with {self.kind.name}, whose "
                f"rule has no weight decay, got {self.weight_decay}. Use EXACT_ROWWISE_ADAGRAD or ADAMW."
            )
        if self.kind == OptimizerKind.EXACT_ROWWISE_ADAGRAD and self.weight_decay_mode == 0:
            raise ValueError(
                f"fused_params of {where}: expected a weight_decay_mode of L2 or DECOUPLE with "
                f"weight_decay = {self.weight_decay}, got NONE, which ignores weight_decay. Set a mode."
            )


_NUMBERS = tuple(field.name for field in fields(RowOptimizer) if field.type == "float")


def output_dtype_of(fused_params: Mapping[str, Any] | None, where: str) -> torch.dtype:
    """Returns the dtype of the outputs: `output_dtype` of `fused_params`, else float32."""
    value = (fused_params or {}).get("output_dtype")
    if value is None:
        return torch.float32
    dtype = _OUTPUT_DTYPES.get(value.name) if isinstance(value, enum.Enum) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _OUTPUT_DTYPES.values():
        raise ValueError(
            f"fused_params of {where}: expected output_dtype FP32, FP16 or BF16 of DataType or SparseType, "
            f"or torch.float32, torch.float16 or torch.bfloat16, got {value!r}. Write one of them, or "
            "remove it for float32."
        )
    return dtype


def _by_row(chosen: Mapping[str, Any], where: str) -> OptimizerKind:
    """Returns the rule of ADAM with `use_rowwise_bias_correction`."""
    kind = chosen.get("own", chosen.get("kind", RowOptimizer.kind))
    if kind not in (OptimizerKind.ADAM, OptimizerKind.ADAM_BY_ROW):
        raise ValueError(
            f"fused_params of {where}: expected use_rowwise_bias_correction with ADAM, got it with "
            f"{getattr(kind, 'name', kind)}. Remove it."
        )
    return OptimizerKind.ADAM_BY_ROW


def _with_named_rule(fused_params: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns `fused_params` with a rule in Python, if they name one, for its name and hyper-parameters."""
    value = fused_params.get("optimizer")
    name = "" if isinstance(value, RowRule) or _is_rule(value) else _name_of(value).upper()
    if name not in _NAMED_RULES:
        return fused_params
    rule, keys = _NAMED_RULES[name]
    others = {*_NUMBERS, "weight_decay_mode"} - _OF_ANY_RULE - {*keys}
    if wrong := sorted(others & fused_params.keys()):
        raise ValueError(
            f"fused_params of {where}: expected no hyper-parameters of {name} but learning_rate, "
            f"{', '.join(keys)}, got {', '.join(wrong)}. Remove them."
        )
    numbers = {key: _number(key, fused_params[key], where) for key in keys if key in fused_params}
    given = {key: value for key, value in fused_params.items() if key not in keys}
    return {**given, "optimizer": rule(**numbers)}


def _name_of(value: Any) -> str:
    """Returns the name of an optimizer: a string, or a member of an enum of FBGEMM or TorchRec."""
    return value if isinstance(value, str) else getattr(value, "name", str(value))


def _is_rule(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, RowRule)


def _checked_rule(rule: RowRule, where: str) -> RowRule:
    states = rule.states
    if not rule.name or not isinstance(rule.name, str) or len(states) > len(_BOTH):
        raise ValueError(
            f"fused_params of {where}: expected a RowRule with a name and at most {len(_BOTH)} states, "
            f"got {type(rule).__name__} with the name {rule.name!r} and {len(states)} states."
        )
    wrong = [name for name, state in states.items() if not isinstance(state, RuleState)]
    if wrong or not all(math.isfinite(state.initial) for state in states.values()):
        raise ValueError(
            f"fused_params of {where}: expected a finite RuleState(rowwise, initial) for each state of "
            f"{type(rule).__name__}, got {dict(states)}."
        )
    return rule


def _kind(value: Any, where: str) -> OptimizerKind:
    if _is_rule(value):
        raise ValueError(
            f"fused_params of {where}: expected an object of {value.__name__}, got the class. Write "
            f"{value.__name__}(...)."
        )
    name = _name_of(value)
    try:
        return OptimizerKind[name.upper()]
    except KeyError:
        raise ValueError(
            f"fused_params of {where}: expected an optimizer among {', '.join(OPTIMIZER_NAMES)}, got {name}. "
            "Use one of them, or write a dyn.RowRule."
        ) from None


def _number(key: str, value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"fused_params of {where}: expected a finite {key} >= 0, got {value!r}.")
    if key in ("beta1", "beta2") and number >= 1:
        raise ValueError(f"fused_params of {where}: expected {key} in [0, 1), got {value!r}.")
    return number


def _switch(key: str, value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"fused_params of {where}: expected {key} as True or False, got {value!r}."
        )
    return value


def _decay_mode(key: str, value: Any, where: str) -> int:
    number = getattr(value, "value", value)
    if number not in _DECAY_MODES:
        raise ValueError(
            f"fused_params of {where}: expected a {key} among "
            f"{', '.join(_DECAY_MODES.values())}, got {value!r}."
        )
    return int(number)


def _rounding(key: str, value: Any, where: str) -> None:
    if not value:
        raise ValueError(
            f"fused_params of {where}: expected {key}=True, got {value!r}. "
            "Rows below float32 are always rounded stochastically; remove the key, or the option "
            "of the table's ParameterConstraints."
        )


# How a value of `fused_params` is read: (key, value, where).
_READERS: Mapping[str, Callable[[str, Any, str], Any]] = {
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(("gradient_clipping", "defer_updates", "use_rowwise_bias_correction"), _switch),
    "weight_decay_mode": _decay_mode,
    "stochastic_rounding": _rounding,
}
_WITHOUT_EFFECT = PLACEMENT_KEYS | {"bounds_check_mode"}  # any int64 is an id
