"""What a haystack hides and what is asked about it: seven kinds of questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from herald_exec.reference.filler import Filler
from herald_exec.reference.vocabulary import Encoder
from herald_exec.reference.wordings import Wording

ATTRIBUTES = [
    "code",
    "number",
    "price",
    "limit",
    "size",
    "weight",
    "address",
    "account",
    "budget",
    "record",
    "token",
    "badge",
    "license",
    "room",
    "port",
    "key",
    "index",
    "version",
    "order",
    "ticket",
    "total",
    "count",
    "score",
    "level",
    "depth",
    "height",
    "rate",
    "target",
    "offset",
    "serial",
]
RELATIONS = [
    "owner",
    "parent",
    "partner",
    "manager",
    "teacher",
    "friend",
    "guard",
    "leader",
    "editor",
    "author",
    "agent",
    "driver",
    "doctor",
    "host",
]
ACTIONS = ["opened", "closed", "moved", "copied", "deleted", "updated", "stored", "loaded"]
LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")
SERVICES = ["cache", "server", "index", "table", "client", "queue", "store", "parser"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with one of its right answers.

    Attributes
    ----------
    text
        The bare question.
    answer
        Token ids of one right wording, without the end token.
    fields
        Texts that a right answer contains, each once: values, chain results, or the recited passage.
    needed
        For each token of ``answer``, whether it belongs to a field; the others are free wording.
    """

    task: str
    text: str
    answer: tuple[int, ...]
    fields: tuple[str, ...]
    needed: tuple[bool, ...]

    @property
    def prompt(self) -> str:
        """The question as it follows a haystack; the answer comes right behind."""
        return f"\nQuestion: {self.text}\nAnswer:"


@dataclass(frozen=True, slots=True)
class Item:
    """Something a haystack states, in one or more pieces that lie at separate places."""

    task: str
    pieces: tuple[tuple[int, ...], ...]
    ask: Callable[[], Question]


@dataclass
class World:
    """Draws items and questions of one document; no name is used twice in it.

    Parameters
    ----------
    rng
        All choices come from it.
    single, double
        Words of one and of two tokens; 15% of name parts are of two.
    wording
        How answers are worded.
    """

    rng: Random
    encoder: Encoder
    filler: Filler
    single: Sequence[str]
    double: Sequence[str]
    wording: Wording
    facts: list[tuple[str, str, str]] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def word(self) -> str:
        """A word for a name."""
        return self.rng.choice(self.double if self.rng.random() < 0.15 and self.double else self.single)

    def name(self, joint: str = " ") -> str:
        """Two words that this document has not used together; a third of names share a word with an earlier one."""
        while True:
            first = self.word()
            if self._used and self.rng.random() < 0.33:
                first = self.rng.choice(sorted(self._used)[:64]).partition(" ")[0]
            second = self.word()
            if first != second and f"{first} {second}" not in self._used:
                self._used.add(f"{first} {second}")
                return f"{first}{joint}{second}"

    def value(self) -> str:
        """Five different digits: each stands for its place, so none is doubled when an answer may start anywhere."""
        digits = self.rng.sample("0123456789", 5)
        return "".join(digits if digits[0] != "0" else digits[::-1])

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.encoder(text))

    def _question(self, task: str, wordings: Sequence[str], answer: str, fields: Sequence[str]) -> Question:
        ids, needed = self.encoder.marked(answer, fields)
        return Question(task, self.rng.choice(wordings), ids, tuple(fields), needed)

    def _stated(self, attribute: str, name: str, value: str) -> str:
        # The name stands before the value: attention is block-causal, so a value in the block before its name's cannot
        # know whose it is.
        return self.rng.choice(
            (
                f" The {attribute} of {name} is {value}.",
                f" Note that {name} has the {attribute} {value}.",
                f" For {name}, the {attribute} was set to {value}.",
                f" Records show the {attribute} of {name} as {value}.",
                f" They gave {name} a new {attribute}: {value}.",
                f" Remember: {attribute} of {name} = {value}.",
            )
        )

    def fact(self) -> Item:
        """One value of one name (task ``kv``); remembered, so that :meth:`ask_multi` can ask for several."""
        name, attribute, value = self.name(), self.rng.choice(ATTRIBUTES), self.value()
        self.facts.append((name, attribute, value))
        piece = self._ids(self._stated(attribute, name, value))
        return Item("kv", (piece,), lambda: self._ask_fact(name, attribute, value))

    def _ask_fact(self, name: str, attribute: str, value: str) -> Question:
        answer = self.wording.fact(attribute, name, value)
        wordings = (
            f"What is the {attribute} of {name}?",
            f"Give the {attribute} of {name}.",
            f"Which {attribute} does {name} have?",
            f"Look up the {attribute} that belongs to {name}.",
        )
        return self._question("kv", wordings, answer, (value,))

    def ask_multi(self) -> Question:
        """Two to four values at once (task ``multi``), in the order asked."""
        chosen = self.rng.sample(self.facts, self.rng.randint(2, min(4, len(self.facts))))
        asked = [f"the {attribute} of {name}" for name, attribute, _ in chosen]
        joined = ", ".join(asked[:-1]) + f" and {asked[-1]}"
        wordings = (f"What are {joined}?", f"Give {joined}.", f"List {joined}.")
        answer = self.wording.several([(name, value) for name, _, value in chosen])
        return self._question("multi", wordings, answer, [value for _, _, value in chosen])

    def hop(self) -> Item:
        """A value behind one relation (task ``hop``): two pieces, neither of which holds both names."""
        relation, attribute = self.rng.choice(RELATIONS), self.rng.choice(ATTRIBUTES)
        first, second, value = self.name(), self.name(), self.value()
        link = self.rng.choice(
            (
                f" The {relation} of {first} is {second}.",
                f" {first} took {second} as {relation}.",
                f" We know the {relation} of {first} to be {second}.",
            )
        )
        pieces = (self._ids(link), self._ids(self._stated(attribute, second, value)))

        def ask() -> Question:
            answer = self.wording.hop(relation, first, second, attribute, value)
            wordings = (
                f"What is the {attribute} of the {relation} of {first}?",
                f"Find the {relation} of {first} and give that {attribute}.",
            )
            return self._question("hop", wordings, answer, (second, value))

        return Item("hop", pieces, ask)

    def code(self) -> Item:
        """A constant defined far from its use (task ``code``)."""
        name, value = self.name("_"), self.value()
        definition = self.rng.choice(
            (f" {name} = {value}\n", f" const {name} = {value};\n", f" static int {name} = {value};\n")
        )

        def ask() -> Question:
            answer = self.wording.code(name, value)
            wordings = (
                f"Write a line of code with {name} and its value.",
                f"Use {name} with its value in one line of code.",
                f"Complete the code: which value does {name} hold?",
            )
            return self._question("code", wordings, answer, (name, value))

        return Item("code", (self._ids(definition),), ask)

    def log(self) -> Item:
        """A log line, to be turned into JSON (task ``log``): about 50 tokens, two blocks."""
        name, item, duration = self.name(), self.value(), self.value()
        level, service, action = self.rng.choice(LEVELS), self.rng.choice(SERVICES), self.rng.choice(ACTIONS)
        line = f" [{level}] {service}: {name} {action} item {item} in {duration} ms\n"
        pairs = [("level", level), ("service", service), ("user", name), ("item", item), ("ms", duration)]

        def ask() -> Question:
            answer = self.wording.log(pairs)
            wordings = (f"Convert the log line of {name} to JSON.", f"Give the log entry of {name} as JSON.")
            return self._question("log", wordings, answer, [f'"{key}": "{value}"' for key, value in pairs])

        return Item("log", (self._ids(line),), ask)

    def passage(self) -> Item:
        """A passage to recite word for word (task ``rec``): 60 to 84 tokens, two to three blocks, one right answer."""
        name = self.name()
        body = self.filler.draw(self.rng, self.rng.randint(60, 84))
        words = self.encoder.decode(body).split()
        while len(self._ids(text := " " + " ".join(words))) > 84:
            words.pop()

        def ask() -> Question:
            wordings = (f"Recite the passage {name}.", f"Repeat the passage {name} word for word.")
            return self._question("rec", wordings, text, (text.strip(),))

        return Item("rec", (self._ids(f"\nPassage {name}:") + self._ids(text) + self._ids("\n"),), ask)

    def ask_arithmetic(self) -> Question:
        """Four to six steps of arithmetic, worked out (task ``arith``); needs nothing from the haystack."""
        total = self.rng.randint(11, 60)
        told, worked, results = [f"Start with {total}"], [], []
        for _ in range(self.rng.randint(4, 6)):
            before = total
            operation, amount = self.rng.choice("+-*"), self.rng.randint(2, 30)
            if operation == "*" and total < 300:
                amount = self.rng.randint(2, 3)
                total *= amount
                told.append(f"times {amount}")
            elif operation == "-" and total > amount:
                total -= amount
                told.append(f"minus {amount}")
            else:
                operation = "+"
                total += amount
                told.append(f"plus {amount}")
            worked.append(f"{before} {operation} {amount} = {total}")
            results.append(str(total))
        answer = self.wording.arithmetic(worked, total)
        steps = ", ".join(told)
        return self._question("arith", (f"{steps}. Work it out step by step.",), answer, worked)
