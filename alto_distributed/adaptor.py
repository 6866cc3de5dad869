"""E: gives any torch optimizer the gradient plus a multiple of its own acceleration.

``E(SGD)`` is the paper's ESGD, ``E(Adam)`` its EAdam; anything with torch.optim's interface will do. The
adaptation is elementwise, so it needs no layouts: sharded tensors are adapted where they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from . import states
from .eager import EagerStep
from .errors import refuse_unsupported_gradient, shown
from .hyperparameters import check_alpha, check_beta, refuse_unknown
from .optimizer import ALTO
from .sharding.dtensor import like_parameter
from .state_dict import check_group_sizes, check_saved_state, load_exactly, saved_tensors

ALPHA = "e_alpha"
BETA1 = "e_beta1"
#: The constructor's names -> the keys of groups.
_KEYS = {"alpha": ALPHA, "beta1": BETA1}
# The beta1 with which a group's averages were gathered (see states.GRAD_EMA_BETA1).
GATHERED_WITH = "e_grad_ema_beta1"


class E(EagerStep):
    """Adapt ``base_optimizer``: it sees d = g + alpha*a, with a the acceleration of the gradient g.

    Args:
        base_optimizer: any ``torch.optim.Optimizer``. E shares its parameter groups and its state, so
            schedulers, ``add_param_group`` and ``state_dict`` of either are those of both.
        alpha: weight of the acceleration, ``|alpha| < 1/(1 - beta1)``.
        beta1: decay of the acceleration.

    Each parameter gets one more state, ``grad_ema``, in the base optimizer's own state. A group may
    override ``e_alpha`` and ``e_beta1``, also as ``alpha`` and ``beta1`` if the base has no such options. ``p.grad``
    holds the adapted gradient only while the base optimizer steps; afterwards it is what it was.

    A base optimizer that calls the closure several times in a step (LBFGS) sees every gradient adapted
    with the same average; the average advances once a step, with the first gradient.

    References:
        Paper, equation "g_k + alpha a_k -> g_k"; here in the one-tensor form of kernels/reference.py.
    """

    def __init__(self, base_optimizer: Optimizer, alpha: float = -5.0, beta1: float = 0.99) -> None:
        if not isinstance(base_optimizer, Optimizer):
            raise ValueError(f"E adapts a torch.optim.Optimizer, got a {type(base_optimizer).__name__}")
        if isinstance(base_optimizer, E):
            raise ValueError("the optimizer is adapted already: E of E has no meaning in the paper")
        if isinstance(base_optimizer, ALTO) and any(group["alpha"] != 0 for group in base_optimizer.param_groups):
            raise ValueError("ALTO with alpha != 0 is E of LAMB already; use it alone, or give E an ALTO with alpha=0")
        if isinstance(base_optimizer, ALTO) and base_optimizer.skip_nonfinite:
            raise ValueError("E's average would take in what ALTO skips; leave out skip_nonfinite")
        self.base = base_optimizer
        beta1 = check_beta("beta1", beta1)
        self._own_defaults = {ALPHA: check_alpha(alpha, beta1), BETA1: beta1}
        # Optimizer.__init__ would copy groups that must stay shared; its other half sets up the hooks.
        super().__setstate__({})
        for group in self.param_groups:
            group.update(self._completed(group))
            for name in self._misnamed(group):
                del group[name]

    # The base optimizer replaces these two objects when it loads a state_dict: never hold on to them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(self._completed(param_group))

    def _completed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        complete = {**self._own_defaults, **group}
        for name in self._misnamed(group):
            complete[_KEYS[name]] = complete.pop(name)
        _checked(complete)
        return complete

    def _misnamed(self, group: Mapping[str, Any]) -> list[str]:
        """The constructor's names among a group's keys: the base, which has none of that name, would ignore them."""
        return [name for name in _KEYS if name in group and name not in self.defaults]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapt the gradients, step the base optimizer, give the gradients back.

        Args:
            closure: re-evaluates the model and returns the loss; passed on to the base optimizer, whose
                calls of it return with the gradients adapted.

        Returns:
            What the base optimizer's step returns.
        """
        averages = self._take_averages()
        originals: dict[torch.Tensor, torch.Tensor] = {}
        first: dict[torch.Tensor, tuple[torch.Tensor, float]] = {}

        def adapt() -> None:
            for param, grad, alpha, beta1 in self._gradients(averages):
                if param not in averages:
                    averages[param] = states.new_state(param)
                average = averages[param]
                originals[param] = grad
                first.setdefault(param, (grad, beta1))
                # d = g + alpha*(1-beta1)*(g - u): a mix of the gradient and its average, weighed by rho
                rho = -alpha * (1 - beta1)
                param.grad = torch.lerp(grad.to(average.dtype), average, rho).to(grad.dtype)

        def adapted_closure() -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            with torch.no_grad():
                adapt()
            return loss

        if isinstance(self.base, ALTO):
            self.base._unadapted = originals
        try:
            if closure is None:
                adapt()
            with _no_global_hooks():
                result = self.base.step() if closure is None else self.base.step(adapted_closure)
            for param, (grad, beta1) in first.items():
                averages[param].lerp_(grad.to(averages[param].dtype), 1 - beta1)
        finally:
            if isinstance(self.base, ALTO):
                self.base._unadapted = None
            for param, grad in originals.items():
                param.grad = grad
            for param, average in averages.items():
                self.state[param][states.GRAD_EMA] = average
        return result

    def _take_averages(self) -> dict[torch.Tensor, torch.Tensor]:
        """Take grad_ema out of the shared state while the base steps: many optimizers set up a
        parameter's state when they find it empty."""
        averages = {}
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                if states.GRAD_EMA in state:
                    averages[param] = state.pop(states.GRAD_EMA)
                    if not state:
                        del self.state[param]
        return averages

    def _gradients(
        self, averages: Mapping[torch.Tensor, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor, float, float]]:
        """(parameter, gradient, alpha, beta1) of all that is to be adapted, each checked."""
        found = []
        for group in self.param_groups:
            alpha, beta1 = _checked(group)
            for name in self._misnamed(group):
                raise ValueError(
                    f"{name}={shown(group[name])} was written into a parameter group of a finished E, where it has no "
                    f"effect. Delete it, and write {_KEYS[name]!r} instead"
                )
            for param in group["params"]:
                # An average that exists is kept up to date also while alpha is 0.
                if param.grad is not None and (alpha != 0 or param in averages):
                    refuse_unsupported_gradient("E", param.grad)
                    group.setdefault(GATHERED_WITH, beta1)
                    found.append((param, like_parameter(param, param.grad), alpha, beta1))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state_dict, grad_ema included."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, all of it or nothing."""
        load_exactly(self.base, self.base.load_state_dict, state_dict, self._check_saved, (states.GRAD_EMA,))

    def _check_saved(self, state_dict: Any) -> None:
        check_group_sizes(state_dict, self.param_groups)
        for g, group in enumerate(state_dict["param_groups"]):
            if ALPHA not in group or BETA1 not in group:
                raise ValueError(
                    f"group {g} of the checkpoint has no {ALPHA!r} and {BETA1!r}: it was saved without E. Load it "
                    "into the base optimizer first and then adapt that, to let grad_ema start from zero"
                )
            _checked(group)
        for g, i, param, saved in saved_tensors(state_dict, self.param_groups):
            if saved and state_dict["param_groups"][g][ALPHA] != 0:
                advice = "a resumed run would differ from the saved one. Save again with E.state_dict()"
                check_saved_state(g, i, param, saved, (states.GRAD_EMA,), advice)

    # Hooks on saving and loading belong to the optimizer that saves and loads.

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.register_state_dict_pre_hook(*args, **kwargs)

    def register_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.register_state_dict_post_hook(*args, **kwargs)

    def register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.register_load_state_dict_pre_hook(*args, **kwargs)

    def register_load_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.register_load_state_dict_post_hook(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "_own_defaults": self._own_defaults}

    def __repr__(self) -> str:
        return f"E({self.base!r})"

    @staticmethod
    def of(base_class: type[Optimizer]) -> type[Adapted]:
        """A class of optimizers: ``E.of(AdamW)(params, lr=1e-3, alpha=-5)`` is ``E(AdamW(params, lr=1e-3), alpha=-5)``.

        It is for clients that take a class and keyword arguments. Where the base has an ``alpha`` or ``beta1`` of its
        own (RMSprop), that is the base's, and E's is ``e_alpha`` or ``e_beta1``.
        """
        if not (isinstance(base_class, type) and issubclass(base_class, Optimizer)):
            raise ValueError(f"E.of takes a class of optimizers such as torch.optim.AdamW, got {shown(base_class)}")
        if issubclass(base_class, E):
            raise ValueError(f"{base_class.__name__} is adapted already: E of E has no meaning in the paper")
        if base_class not in _made:
            members = {"base_class": base_class, "__doc__": E.__doc__}
            _made[base_class] = type(f"E{base_class.__name__}", (Adapted,), members)
        return _made[base_class]


class Adapted(E):
    """E of a class of optimizers; :meth:`E.of` makes one for each base.

    Args:
        params: as for the base.
        args: the base's.
        options: the base's, and E's ``alpha`` and ``beta1``.
    """

    base_class: ClassVar[type[Optimizer]]

    def __init__(self, params: Iterable[Any], *args: Any, **options: Any) -> None:
        own = inspect.signature(self.base_class).parameters
        names = {name: (f"e_{name}" if name in own else name) for name in ("alpha", "beta1")}
        ours = {name: options.pop(given) for name, given in names.items() if given in options}
        unknown = [name for name in options if name not in own and not _takes_any(own)]
        refuse_unknown(unknown, [*names.values(), *list(own)[1:]], f"E of {self.base_class.__name__}")
        super().__init__(self.base_class(params, *args, **options), **ours)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Its class has no name that pickle could find: it is made again."""
        del protocol
        return _empty, (self.base_class,), self.__getstate__()


#: By :meth:`E.of`, so that there is one class for each base.
_made: dict[type, type[Adapted]] = {}


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _empty(base_class: type[Optimizer]) -> E:
    made = E.of(base_class)
    return made.__new__(made)


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Hooks on the steps of all optimizers are called once, for E. The base's step is a part of E's."""
    tables: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _checked(group: Mapping[str, Any]) -> tuple[float, float]:
    """A group's alpha and beta1, or an error if they are out of range or beta1 has changed."""
    beta1 = check_beta(BETA1, group[BETA1])
    if group.get(GATHERED_WITH, beta1) != beta1:
        raise ValueError(
            f"{BETA1} was changed from {group[GATHERED_WITH]} to {beta1} in mid-run: grad_ema was gathered with the "
            "old one. Keep it, or start with a new base optimizer"
        )
    return check_alpha(group[ALPHA], beta1), beta1
