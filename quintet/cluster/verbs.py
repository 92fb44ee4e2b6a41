"""Worker verbs as values: a method of the class that the ranks have, passed as it is, so that types and editors see through Ray.

    group.all(Policy.optimizer_step, phase="train")(role="critic")

What the call needs is given first, what the method takes afterwards. Imports neither torch nor a worker's module.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from quintet.cluster.dispatch import Coords, Dispatch, all_to_all

if TYPE_CHECKING:  # it brings Ray
    from quintet.cluster.calls import PendingCall

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
Returns = int | Literal["streaming"]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a method."""


class Asked(NamedTuple):
    """A call of a verb, as a group carries it: each rank's arguments, and the ranks whose results count, in the order of the results;
    single: there is one, which is no list."""

    verb: Callable[..., Any]
    calls: Mapping[int, Call]
    owners: Sequence[int]
    phase: str | None
    num_returns: Returns = 1
    single: bool = False


class Verb(Generic[P, R_co]):
    """A method, and the ranks that run it once it is called: then it waits for their answers.

    Raises WorkerFailure (or the worker's own UserError) for the first rank that fails; the group is of no use afterwards.
    """

    def __init__(self, start: Callable[[tuple[Any, ...], dict[str, Any]], PendingCall[R_co]]) -> None:
        self._start = start

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self._start(args, kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> PendingCall[R_co]:
        """Call without the wait: two groups can work at once. A rank runs its calls in the order given."""
        return self._start(args, kwargs)


class Ranks(ABC):
    """Ranks that can be asked for verbs; `submit` is what carries a call to them."""

    n_ranks: int

    @abstractmethod
    def coords(self) -> Coords:
        """Return each rank's position on the mesh axes."""

    @abstractmethod
    def submit(self, asked: Asked) -> PendingCall[Any]:
        """Start a call."""

    def all(
        self,
        verb: Callable[Concatenate[Any, P], T],
        *,
        phase: str | None = None,
        told_by: Dispatch = all_to_all,
        coords: Coords | None = None,
        num_returns: int = 1,
    ) -> Verb[P, list[T]]:
        """Return a verb of every rank, with the same arguments. told_by: the protocol that says whose results count.

        In all of these `phase` names the work in messages (null: the method), and `coords` are the ranks' positions in the layout
        that a protocol goes by (null: `coords()`). With `num_returns` = k > 1 the method returns a tuple of k: the first
        comes back as a value, the others as object references, whose objects stay on the worker's node. References may be passed
        on, at any depth of lists, tuples and dicts.
        """
        at = self._positions(told_by, coords)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall[list[T]]:
            calls = dict.fromkeys(range(self.n_ranks), (args, kwargs))
            return self.submit(Asked(verb, calls, told_by.owners(at), phase, num_returns))

        return Verb(start)

    def each(
        self,
        verb: Callable[Concatenate[Any, A, P], T],
        by: Dispatch = all_to_all,
        *,
        phase: str | None = None,
        coords: Coords | None = None,
        num_returns: int = 1,
    ) -> Verb[Concatenate[Sequence[A], P], list[T]]:
        """Return a verb of every rank that takes a list for its first argument: each rank gets its part, by the protocol."""
        return Verb(self._split(verb, by, phase, coords, num_returns))

    def stream(
        self,
        verb: Callable[Concatenate[Any, A, P], Generator[Any, None, tuple[T, *tuple[Any, ...]]]],
        by: Dispatch = all_to_all,
        *,
        phase: str | None = None,
    ) -> Verb[Concatenate[Sequence[A], P], list[tuple[T, *tuple[Any, ...]]]]:
        """Return a verb as `each` does, of a method that is a generator: `PendingCall.heard` is told what it yields while it is
        waited for. Of the tuple that it returns all but the first come back as object references."""
        return Verb(self._split(verb, by, phase, None, "streaming"))

    def one(
        self, verb: Callable[Concatenate[Any, P], T], *, phase: str | None = None, num_returns: int = 1
    ) -> Verb[P, T]:
        """Return a verb of rank 0, for methods without collectives: its one result."""
        return Verb(lambda *call: self.submit(Asked(verb, {0: call}, [0], phase, num_returns, single=True)))

    def _split(
        self,
        verb: Callable[..., Any],
        by: Dispatch,
        phase: str | None,
        coords: Coords | None,
        num_returns: Returns,
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], PendingCall[Any]]:
        """What starts a verb that takes a list for its first argument."""
        at = self._positions(by, coords)

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall[Any]:
            parts, *shared = args
            calls = {rank: ((part, *shared), kwargs) for rank, part in enumerate(by.split(at, parts))}
            return self.submit(Asked(verb, calls, by.owners(at), phase, num_returns))

        return start

    def _positions(self, dispatch: Dispatch, coords: Coords | None) -> Coords:
        if coords is None:
            return [{}] * self.n_ranks if dispatch is all_to_all else self.coords()
        return coords


class StandIn:
    """A class of the ranks, "module:Class", for a process that does not import the module: its attributes are the names of
    methods, as `__name__`, and pickled it is the class. part: the attribute of a worker that has such an object."""

    def __init__(self, where: str, part: str = "") -> None:
        self._where, self._prefix = where, f"{part}." if part else ""
        self.__name__ = where.rpartition(":")[2]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self.__name__} has no verb {name}")
        return _Name(self._prefix + name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the class, in a process that is a rank."""
        return pkgutil.resolve_name(self._where)(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return pkgutil.resolve_name, (self._where,)


class _Name:
    def __init__(self, name: str) -> None:
        self.__name__ = name
