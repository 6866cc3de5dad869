"""Cases: tests that run on every rank. This module names them; launcher.py runs them.

A case is a function ``case_*`` in a module of tests/distributed/cases, with decorators that say where it runs:

    @worlds(2, 4, exhaustive=(8,))             # world sizes; the last one in exhaustive runs alone
    @each(TABLE)                               # once for each setting, each with an id of its own
    @after("case_save", world=2)               # needs the files that another case has left
    def case_something(setting, directory):    # asks by name for what it needs

Importing a module of cases may import DeepSpeed or Megatron, which takes seconds. So ids are read from the source: the
tables that ``each`` names must be dicts with plain strings as keys, or tuples of plain values, at the top of the module
or of one of tests/helpers that it imports them from. Ranks check that what was read is what there is.
"""

import ast
import dataclasses
import functools
import itertools
import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

#: The package of the modules of cases, which are named without it, and that of what they share, which are not.
CASES, HELPERS = "tests.distributed.cases", "tests.helpers"

#: Also what two cores have no time for in everyday runs: variations of what is tested anyway.
EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))

# -- decorators ----------------------------------------------------------------------------------------


def worlds(*sizes, exhaustive=()):
    """Mark a case for some world sizes, given as plain numbers, and some more for exhaustive runs."""
    del sizes, exhaustive  # read from the source
    return lambda case: case


def each(table=None, *, exhaustive=None, **values):
    """Run a case once for each setting, under an id of its own.

    Args:
        table: name of each setting -> what the case gets as ``setting``. The name itself is its ``label``.
        exhaustive: more of the table, for exhaustive runs.
        **values: the values of other parameters. If there are several, all combinations.
    """
    axes = {} if table is None else {"setting": {**table, **(exhaustive if exhaustive and EXHAUSTIVE else {})}}
    axes |= {name: {_label(name, value): value for value in several} for name, several in values.items()}

    def mark(case):
        case.settings = {
            ", ".join(labels): {"label": ", ".join(labels), **_values(axes, labels)}
            for labels in itertools.product(*axes.values())
        }
        return case

    return mark


def some(table=None, **more):
    """As ``each``: all settings at two ranks on the CPU and in exhaustive runs, else every fourth."""
    return each(table, **more)


def after(case, *settings, world=None, of=None):
    """Mark a case that uses the files of another one, which is then run before it, at whatever was selected.

    Args:
        case: the other one; MODULE.CASE if it is in another module.
        *settings: which of its settings; without any, the same as this one's if it has it, else all.
        world: at which world size; without it, at the same one.
        of: this case's settings are tuples, and the other one's setting stands at this place in them.
    """
    del case, settings, world, of  # read from the source
    return lambda case: case


def _label(name, value):
    return value if isinstance(value, str) else f"{name} {value}"


def _values(axes, labels):
    return {name: axis[label] for (name, axis), label in zip(axes.items(), labels, strict=True)}


# -- what a test is given ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launch:
    """Ranks that are started once for many cases."""

    modules: str  # with commas between them
    world: int
    device: str
    variables: tuple[tuple[str, str], ...] = ()

    def cases(self):
        """All cases that could run there, in the order in which they do, by id."""
        return _cases_of(self)


@dataclasses.dataclass(frozen=True)
class Need:
    """What ``after`` said."""

    module: str
    function: str
    settings: tuple[str, ...]
    world: int | None
    theirs: tuple[tuple[str, str], ...] = ()  # a setting of the one that needs, and what it needs


@dataclasses.dataclass(frozen=True)
class Case:
    """One case with one setting, on the ranks of one launch."""

    launch: Launch
    module: str
    function: str
    setting: str | None = None
    needs: tuple[Need, ...] = ()

    @property
    def id(self):
        return self.function if self.setting is None else f"{self.function}-{self.setting}"

    def before(self):
        """The cases that have to be run before this one."""
        for need in self.needs:
            modules = self.launch.modules if need.module in self.launch.modules.split(",") else need.module
            launch = dataclasses.replace(self.launch, modules=modules, world=need.world or self.launch.world)
            there = [case for case in launch.cases().values() if case.function == need.function]
            wanted = need.settings or [other for mine, other in need.theirs if mine == self.setting]
            wanted = wanted or ([self.setting] if self.setting in [c.setting for c in there] else ())
            found = [case for case in there if not wanted or case.setting in wanted]
            if not found or len(found) < len(wanted):
                raise ValueError(f"{self.id} needs {need}, of which there is not all at {launch.world} ranks")
            order = list(launch.cases())
            if launch == self.launch and order.index(found[-1].id) > order.index(self.id):
                raise ValueError(f"{self.id} needs {found[-1].id}, which comes after it in the source")
            yield from found


def every_case(modules, *world_sizes, only=None, device=None, **variables):
    """Parameters for a test of each case.

    Args:
        modules: names of modules of cases, with commas between them; they share their ranks.
        *world_sizes: numbers of ranks.
        only: the id of one case, or the name of its function.
        device: overrides DEVICE (tests/helpers/devices.py).
        **variables: of the environment, for the ranks.
    """
    import pytest

    launches = [Launch(modules, world, device or _device(), tuple(sorted(variables.items()))) for world in world_sizes]
    found = [case for launch in launches for case in launch.cases().values() if only in (None, case.id, case.function)]
    if only and not found:
        raise ValueError(f"{modules} has no case {only}")
    return [pytest.param(case, id=f"{case.launch.world}ranks-{case.id}") for case in found]


def with_all_before(cases):
    """These cases and all that they need, by launch."""
    chosen, waiting = {}, list(cases)
    while waiting:
        case = waiting.pop()
        ids = chosen.setdefault(case.launch, set())
        if case.id not in ids:
            ids.add(case.id)
            waiting += case.before()
    return chosen


def _device():
    return os.environ.get("DEVICE", "cpu")


# -- reading the source --------------------------------------------------------------------------------


@functools.cache
def _source(module):
    name = module if module.startswith(HELPERS) else f"{CASES}.{module}"
    return ast.parse((REPO / f"{name.replace('.', '/')}.py").read_text()).body


@functools.cache
def _cases_of(launch):
    cases = {}
    all_settings = EXHAUSTIVE or (launch.world == 2 and launch.device == "cpu")
    for module in launch.modules.split(","):
        for function, sizes, settings, few, needs in functions_in(module):
            for setting in settings[:: 4 if few and not all_settings else 1] if launch.world in sizes else ():
                case = Case(launch, module, function, setting, needs)
                if cases.setdefault(case.id, case) is not case:
                    raise ValueError(f"two cases of {launch.modules} are named {case.id}")
    return cases


@functools.cache
def functions_in(module):
    """Of each case: its name, world sizes, labels of settings, whether some of them suffice, and needs."""
    found = []
    for node in _source(module):
        marks = {}
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call):
                marks.setdefault(ast.unparse(mark.func), []).append(mark)
        if "worlds" not in marks:
            continue
        (where,) = marks["worlds"]
        sizes = [ast.literal_eval(size) for size in where.args]
        for keyword in where.keywords if EXHAUSTIVE else ():
            sizes += ast.literal_eval(keyword.value)
        settings = (None,)
        for mark in (*marks.get("each", ()), *marks.get("some", ())):
            settings = tuple(", ".join(labels) for labels in itertools.product(*_axes(module, mark)))
        needs = tuple(_need(module, mark, marks) for mark in marks.get("after", ()))
        found.append((node.name, sizes, settings, "some" in marks, needs))
    return found


def _axes(module, mark):
    keywords = {keyword.arg: keyword.value for keyword in mark.keywords}
    more = keywords.pop("exhaustive", None)
    tables = [_labels(module, table) for table in mark.args]
    if more is not None and EXHAUSTIVE:
        tables[0] = list(dict.fromkeys([*tables[0], *_labels(module, more)]))
    return [*tables, *(_labels(module, several, name) for name, several in keywords.items())]


def _labels(module, node, name=None):
    """The keys of a dict, or the values of a tuple, that the source of a module shows."""
    if isinstance(node, ast.Name):
        return _labels(*_assigned(module, node.id), name)
    if isinstance(node, ast.Dict):
        return list(_entries(module, node))
    return [_label(name, value) for value in ast.literal_eval(node)]


def _entries(module, node):
    """The keys of a dict with the expressions of their values."""
    if isinstance(node, ast.Name):
        return _entries(*_assigned(module, node.id))
    entries = {}
    for key, value in zip(node.keys, node.values, strict=True):
        entries.update({ast.literal_eval(key): value} if key else _entries(module, value))
    return entries


def _assigned(module, name):
    """What a name stands for at the top of a module: the module that says so, and the expression."""
    for node in _source(module):
        if isinstance(node, ast.Assign) and name in [ast.unparse(target) for target in node.targets]:
            return module, node.value
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HELPERS):
            for imported in node.names:
                if name == (imported.asname or imported.name):
                    return _assigned(node.module, imported.name)
    raise ValueError(f"{module}.py: the settings {name} cannot be read from the source")


def _need(module, mark, marks):
    case, *settings = (ast.literal_eval(argument) for argument in mark.args)
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
    home, _, function = case.rpartition(".")
    theirs = {}
    if "of" in keywords:
        (table,) = marks.get("each", ()) or marks["some"]
        for source in (*table.args, *(keyword.value for keyword in table.keywords)):
            entries = _entries(module, source).items()
            theirs |= {label: ast.literal_eval(value.elts[keywords["of"]]) for label, value in entries}
    return Need(home or module, function, tuple(settings), keywords.get("world"), tuple(theirs.items()))
