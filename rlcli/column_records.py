"""Records whose columns may be absent.

Letters in the shapes of columns, here and elsewhere:

    T  tokens of all sequences, those of the prompts too
    R  response tokens, those that the policy generated, of all sequences, one sequence after another
    S  sequences, each a response or a conversation; an empty one counts
    G  groups, each the sequences that answer one prompt
    K  entries of each token or sequence: candidate tokens, parts of a reward, turns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar, overload

from rlcli.errors import RlcliError

V = TypeVar("V")


class Column(Generic[V]):
    """A field of a record that may be absent. Reading an absent one raises `RlcliError` with its name, so what is read
    has the type of the values alone. Absent: not given, or None.

    >>> class Scores(Columns):
    ...     rewards = Column[list[float]]("float", "S")
    ...     lengths = Column[list[int]]("int64", "S")
    >>> scores = Scores()
    >>> scores.rewards = [1.0, 0.0]
    >>> scores.rewards, scores.has("lengths")
    ([1.0, 0.0], False)
    >>> scores.lengths
    Traceback (most recent call last):
    rlcli.errors.RlcliError: 'lengths' is not given; give it: Scores(lengths=…)
    """

    def __init__(self, dtype: str, *shape: str) -> None:
        self.dtype, self.shape, self.name = dtype, shape, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, record: None, owner: type) -> None: ...
    @overload
    def __get__(self, record: Columns, owner: type) -> V: ...
    def __get__(self, record: Columns | None, owner: type) -> V | None:
        if record is None:
            return None  # the default of a dataclass's field
        if self.name not in record.__dict__:
            raise record.absent(self.name)
        value: V = record.__dict__[self.name]
        return value

    def __set__(self, record: Columns, value: V | None) -> None:
        if value is None:
            record.__dict__.pop(self.name, None)
        else:
            record.__dict__[self.name] = value


class Columns:
    """The base of dataclasses whose fields are `Column`s."""

    @classmethod
    def columns(cls) -> Mapping[str, Column[Any]]:
        """All columns that the record can have, by name."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, Column)}

    def has(self, name: str) -> bool:
        """True if the column is present."""
        assert name in self.columns(), f"{type(self).__name__} has no {name}"
        return name in self.__dict__

    def get(self, name: str) -> Any:
        """The column, or None if it is absent."""
        assert name in self.columns(), f"{type(self).__name__} has no {name}"
        return self.__dict__.get(name)

    def set(self, name: str, values: Any) -> None:
        """Fill the column in; None removes it."""
        assert name in self.columns(), f"{type(self).__name__} has no {name}"
        setattr(self, name, values)

    def present(self) -> dict[str, Any]:
        """The columns that are present, by name, in the order of the fields."""
        return {name: self.__dict__[name] for name in self.columns() if name in self.__dict__}

    def map(self, function: Callable[[Any], Any]) -> Self:
        """The same record with each column replaced by what `function` makes of it."""
        return self.replace(**{name: function(values) for name, values in self.present().items()})

    def replace(self, **columns: Any) -> Self:
        """The same record with these columns; None removes one."""
        return type(self)(**{**self.__dict__, **columns})

    def absent(self, name: str) -> RlcliError:
        """The error for reading a column that is absent."""
        return RlcliError(f"'{name}' is not given", f"give it: {type(self).__name__}({name}=…)")
