"""In how many ways an answer may be worded: in one, freely, or in many ways of one length.

What an answer says is fixed by its question, how it says it is not: so a block takes several denoising steps, as in
real use. With one fixed wording the trial's model finished blocks in one to four steps, and a single representative
query found little but its own source token. With values in any order and twenty frames the first model mixed digits of
several values.
"""

# ruff: noqa: D102  (the protocol says what each method words)

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

_Form = TypeVar("_Form")

OPENERS = ("", " Sure:", " As recorded above,")
CLOSERS = (".", ", as noted above.", "; that is all.")
VERBS = ("is", "reads")


class Wording(Protocol):
    """An answer to each kind of question, as text behind ``Answer:``; see :mod:`herald_exec.reference.facts`."""

    def fact(self, attribute: str, name: str, value: str) -> str:
        """One value of one name."""

    def several(self, stated: Sequence[tuple[str, str]]) -> str:
        """Names with their values, in this order."""

    def hop(self, relation: str, first: str, second: str, attribute: str, value: str) -> str:
        """``second`` is the ``relation`` of ``first`` and has the value."""

    def code(self, name: str, value: str) -> str:
        """A line of code with a constant and its value."""

    def log(self, pairs: Sequence[tuple[str, str]]) -> str:
        """A log line's five fields as JSON."""

    def arithmetic(self, worked: Sequence[str], total: int) -> str:
        """Steps worked out and their result."""


class Free:
    """Openers, forms, verbs and closers of several lengths: a token's place depends on the wording before it."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def _pick(self, forms: Sequence[_Form]) -> _Form:
        return self._rng.choice(forms)

    def _dressed(self, form: str) -> str:
        return f"{self._pick(OPENERS)} {form}{self._pick(CLOSERS)}"

    def fact(self, attribute: str, name: str, value: str) -> str:
        verb = self._pick(VERBS)
        form = self._pick(
            (
                f"the {attribute} of {name} {verb} {value}",
                f"{name} has the {attribute} {value}",
                f"for {name} the {attribute} {verb} {value}",
            )
        )
        return self._dressed(form)

    def several(self, stated: Sequence[tuple[str, str]]) -> str:
        said = [self._pick((f"{name}: {value}", f"{name} has {value}")) for name, value in stated]
        return self._dressed("; ".join(said))

    def hop(self, relation: str, first: str, second: str, attribute: str, value: str) -> str:
        form = self._pick(
            (
                f"the {relation} of {first} is {second}, whose {attribute} {self._pick(VERBS)} {value}",
                f"{first} has {second} as {relation}, so the {attribute} is {value}",
            )
        )
        return self._dressed(form)

    def code(self, name: str, value: str) -> str:
        target = self._pick(("", " x =", " result ="))
        form = self._pick((f"check({name}, {value})", f"test({name} == {value})", f"set({name}={value})"))
        remark = self._pick(("", " # from its definition", " # see above"))
        return f"{target} {form}{remark}"

    def log(self, pairs: Sequence[tuple[str, str]]) -> str:
        order = self._pick(((0, 1, 2, 3, 4), (2, 0, 1, 4, 3), (3, 4, 2, 1, 0)))
        body = ", ".join(f'"{pairs[index][0]}": "{pairs[index][1]}"' for index in order)
        return f"{self._pick(('', ' Sure:', ' JSON:'))} {{{body}}}"

    def arithmetic(self, worked: Sequence[str], total: int) -> str:
        joint = self._pick(("; ", ", then "))
        return f"{self._pick(OPENERS)} {joint.join(worked)}. Result: {total}."


class One(Free):
    """The first form of each, so that every masked position has one right token and retrieval forms quickly."""

    def __init__(self) -> None:
        super().__init__(Random(0))

    def _pick(self, forms: Sequence[_Form]) -> _Form:
        return forms[0]


class Aligned:
    """Words of one token in the place of each other: whatever is chosen, every token of the content keeps its place.

    Where wordings differ in length, a masked place may hold a value's token under one and a neighbour's under another.
    Models trained on :class:`Free` wordings then wrote some tokens twice and lost others, in one long answer of seven,
    though they had retrieved the right ones.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def _one_of(self, words: str) -> str:
        return self._rng.choice(words.split())

    def _opener(self) -> str:
        return f" {self._one_of('Sure Well Note So Result')}{self._one_of(': ,')}"

    def _remark(self) -> str:
        said, place = self._one_of("noted written given shown"), self._one_of("above there earlier here")
        return f" as {said} {place}{self._one_of('. !')}"

    def _closer(self) -> str:
        return f"{self._one_of(', ;')}{self._remark()}"

    def _verb(self) -> str:
        return self._one_of("is reads was")

    def fact(self, attribute: str, name: str, value: str) -> str:
        article = self._one_of("the that")
        return f"{self._opener()} {article} {attribute} of {name} {self._verb()} {value}{self._closer()}"

    def several(self, stated: Sequence[tuple[str, str]]) -> str:
        said = f" {self._one_of('here there thus now')}{self._one_of(': ,')}"
        for place, (name, value) in enumerate(stated):
            joint = self._one_of("; ,") if place else ""
            said += f"{joint} {name}{self._rng.choice((':', ' has', ' is', ' reads'))} {value}"
        return f"{self._opener()}{said}{self._closer()}"

    def hop(self, relation: str, first: str, second: str, attribute: str, value: str) -> str:
        article, owner = self._one_of("the that"), self._one_of("whose its")
        link = f"{article} {relation} of {first} {self._verb()} {second}{self._one_of(', ;')}"
        return f"{self._opener()} {link} {owner} {attribute} {self._verb()} {value}{self._closer()}"

    def code(self, name: str, value: str) -> str:
        target, call = self._one_of("x y result value total"), self._one_of("check test set use call")
        joint = self._rng.choice((",", ":", " =", " =="))
        remark = (
            f"{self._one_of('from by see')} {self._one_of('its the this')} {self._one_of('definition value place')}"
        )
        return f" {target} = {call}({name}{joint} {value}) # {remark}"

    def log(self, pairs: Sequence[tuple[str, str]]) -> str:
        body = ", ".join(f'"{key}": "{value}"' for key, value in pairs)
        return f" {self._one_of('Sure JSON Note So')}{self._one_of(': ,')} {{{body}}}{self._remark()}"

    def arithmetic(self, worked: Sequence[str], total: int) -> str:
        said = worked[0] + "".join(f"{self._one_of('; ,')} {step}" for step in worked[1:])
        return f"{self._opener()} {said}{self._one_of('. ;')} Result: {total}{self._one_of('. !')}"


WORDINGS = ("one", "free", "aligned")


def wording(name: str, rng: Random) -> Wording:
    """The wording of a name of :data:`WORDINGS`, its choices drawn from ``rng``."""
    if name == "one":
        return One()
    return Free(rng) if name == "free" else Aligned(rng)
