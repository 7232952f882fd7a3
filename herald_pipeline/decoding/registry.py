"""Policies by name: a name is a constructor with some parameters already set."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from herald_pipeline.errors import ConfigError, did_you_mean, unknown_name

Policy = TypeVar("Policy")


@dataclass(frozen=True, slots=True)
class Entry(Generic[Policy]):
    """One name of a registry: the policy's class, the parameters that the name fixes, and where they come from."""

    policy: Callable[..., Policy]
    defaults: Mapping[str, Any]
    source: str


class Registry(Generic[Policy]):
    """Names of one kind of policy (``"decoder"``, ``"scheduler"``, ``"cache"``).

    A name is registered once, in the module that defines its policy.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[Policy]] = {}

    def add(self, name: str, policy: Callable[..., Policy], source: str, **defaults: Any) -> None:
        """Register ``name`` for ``policy(**defaults)``; ``source`` says whose rule it is."""
        if name in self._entries:
            message = f"{self.kind} {name!r} is registered twice"
            raise ValueError(message)
        self._entries[name] = Entry(policy, defaults, source)

    def get(self, name: str, **params: Any) -> Policy:
        """Policy of that name with ``params`` over its defaults.

        Raises
        ------
        ConfigError
            Unknown name or parameter (with the closest that exists), or a value that the policy refuses.
        """
        entry = self.entry(name)
        valid = self.parameters(name)
        unknown = [key for key in params if key not in valid]
        if unknown:
            raise ConfigError(
                [
                    f"{self.kind} {name!r} has no parameter {key!r}"
                    + (did_you_mean(key, valid) if valid else "; it has none")
                    for key in unknown
                ]
            )
        return entry.policy(**{**entry.defaults, **params})

    def entry(self, name: str) -> Entry[Policy]:
        """The entry of ``name``, or the error that names the closest."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def parameters(self, name: str) -> dict[str, Any]:
        """Parameters of ``name`` with the values they have when not given."""
        entry = self.entry(name)
        own = {f.name: f.default for f in fields(entry.policy) if f.init}  # type: ignore[arg-type]
        return {**own, **entry.defaults}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries
