"""The what-if page: a form, and what the simulator says to it; served on this machine only.

    python -m reports serve                    # then open the address it prints
    python -m reports serve --pages out/demo   # with the pages of that folder beside the form

Nothing is loaded from elsewhere, nothing is written, and requests that do not come to a local name are refused.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import jinja2
import pandas as pd
from markupsafe import Markup

from herald_pipeline import catalogue, hardware_io, methods
from herald_pipeline.errors import ConfigError, HeraldError, check_number, raise_problems, read_failure
from herald_pipeline.model import Attention
from herald_sim.options import Options
from herald_sim.simulate import simulate
from reports import charts, frames
from reports.page import TEMPLATES, Cell, Section, Table, render

_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_MAX_BATCH, _MAX_CONTEXT = 1024, 1 << 20
"""A page is answered while somebody waits: larger questions are for the command line."""
_BLOCKS = 6
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"
"""Nothing from outside the page; vega compiles its expressions, which needs unsafe-eval."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the form asks; texts as they were typed."""

    model: str = "llada2-mini"
    hardware: str = "h100-sxm-80g_xeon-8481c"
    methods: tuple[str, ...] = ("dense", "mage-offload", "herald")
    context: str = "32768"
    batch: str = "16"
    steps: str = "20"
    budget: str = ""
    sets: str = ""

    @classmethod
    def of(cls, query: str) -> "Question":
        """From the address; what it leaves out has its default, what it does not know is refused."""
        given = parse_qs(query, keep_blank_values=True)
        unknown = sorted(set(given) - set(cls.__slots__))
        if unknown:
            message = f"unknown field {', '.join(unknown)}; the form has {', '.join(cls.__slots__)}"
            raise ConfigError(message)
        found: dict[str, Any] = {name: values[0].strip() for name, values in given.items() if name != "methods"}
        if "methods" in given:
            found["methods"] = tuple(given["methods"])
        return cls(**found)

    def options(self, method: str) -> Options:
        """One method's run."""
        context, batch = _whole(self.context, "context", _MAX_CONTEXT), _whole(self.batch, "batch", _MAX_BATCH)
        model = catalogue.resolve(_known(self.model, catalogue.names(), "model"))
        return Options(
            self.model,
            method,
            _known(self.hardware, hardware_io.names(), "hardware"),
            context,
            batch,
            steps=self.steps or None,
            budget=_number(self.budget, "budget") if self.budget else None,
            gen_tokens=_BLOCKS * model.block_length,
            sets=tuple(self.sets.split()),
        )


def _known(name: str, names: Sequence[str], what: str) -> str:
    """Names only: a path would let a page read files."""
    if name not in names:
        message = f"{what} must be one of {', '.join(names)}, got {name!r}"
        raise ConfigError(message)
    return name


def _whole(text: str, name: str, most: int) -> int:
    value = _number(text, name)
    raise_problems([check_number(value, name, minimum=1, maximum=most, integer=True)])
    return int(value)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = f"{name} must be a number, got {text!r}"
        raise ConfigError(message) from None


# Answers -------------------------------------------------------------------------------------------------------------


def answer(question: Question) -> list[Section]:
    """Throughput of every method asked for, the machine's ceilings, and what lies where.

    Raises
    ------
    HeraldError
        The question makes no sense; a method that does not fit is a row that says so.
    """
    if not question.methods:
        message = "no method is ticked"
        raise ConfigError(message)
    rows, refused = [], []
    for method in question.methods:
        options = question.options(method)
        pipeline, profile = options.pipeline(), options.profile()
        try:
            result = simulate(pipeline, profile, options.workload(pipeline.settings))
        except HeraldError as problem:
            refused.append(f"{method}: {problem}")
            continue
        rows.append({"method": method, **result.to_dict()})
    first = question.options(question.methods[0])
    profile = first.profile()
    title = f"{question.model}, {int(first.context or 0):,} tokens, batch {first.batch}, T = {question.steps or 20}"
    sections = [_throughput(rows, refused, title, profile.name)]
    if (question.steps or "20").isdigit():
        steps, batch = int(question.steps or 20), first.batch or 1
        frame = frames.ceiling_rows(first.shape(), profile, first.context or 1, steps, batch)
        sections.append(Section("Ceilings", (), charts.ceilings(frame, f"Ceilings: {title}", f"on {profile.name}")))
    if rows:
        tokens = (first.context or 0) + _BLOCKS * first.shape().block_length
        names = [row["method"] for row in rows]
        memory = frames.memory_rows(first.shape(), profile, names, tokens, first.batch or 1, "bf16")
        sections.append(Section("Memory", (), charts.memory(memory, f"Memory: {title}", "computed, as for admission")))
    return sections


_SHOWN = {
    "throughput_tok_s": ("tok/s", "{:,.0f}"),
    "block_time_s": ("block (s)", "{:.4f}"),
    "main_time_s": ("main (s)", "{:.4f}"),
    "retrieval_time_s": ("retrieval (s)", "{:.4f}"),
    "stall_s": ("stall (s)", "{:.4f}"),
    "status": ("status", "{}"),
    "limit": ("limit", "{}"),
}


def _throughput(rows: list[dict[str, Any]], refused: list[str], title: str, hardware: str) -> Section:
    header = ("method", *(name for name, _ in _SHOWN.values()))
    cells = [(Cell(row["method"]), *(_cell(row, key) for key in _SHOWN)) for row in rows]
    notes = [
        f"{row['method']}: outside what was measured: {', '.join(row['extrapolated'])}"
        for row in rows
        if row.get("extrapolated")
    ]
    chart = None
    if rows:
        chart = charts.throughput_bars(pd.DataFrame(rows), f"Throughput: {title}", f"simulated on {hardware}")
    return Section("Throughput", (), chart, "", Table(header, cells) if rows else None, [*refused, *notes])


def _cell(row: dict[str, Any], key: str) -> Cell:
    """A figure; empty where there is none. A method without retrieval has no time of it, not a time of zero."""
    value = row.get(key)
    if value is None or (key == "retrieval_time_s" and value == 0):
        return Cell("")
    return Cell(_SHOWN[key][1].format(value), "" if isinstance(value, str) else "number")


# The server ----------------------------------------------------------------------------------------------------------


def page(question: Question, pages: Sequence[str], sections: Sequence[Section], error: str = "") -> str:
    """The form with its answer below."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    causal = [name for name in catalogue.names() if catalogue.get(name).attention is Attention.BLOCK_CAUSAL]
    form = environment.get_template("form.html.j2").render(
        question=question,
        models=causal,
        machines=hardware_io.names(),
        methods=methods.names(),
        pages=[(name, quote(name)) for name in pages],
        error=error,
    )
    lead = "Change something and simulate: the same simulator as herald-sim run, on this machine."
    return render("What if?", lead, sections, top=Markup(form))


class Handler(BaseHTTPRequestHandler):
    """Answers the form and hands out the pages of one folder."""

    server_version = "herald-reports"
    sys_version = ""
    say: Callable[[str], None] = staticmethod(lambda line: None)
    lock = threading.Lock()

    def __init__(self, *arguments: Any, pages: Path | None, **others: Any) -> None:
        self.pages = pages
        super().__init__(*arguments, **others)

    def do_GET(self) -> None:
        """One page."""
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in _LOCAL:
            # A foreign name that resolves to this machine is another site's page asking.
            self._send(HTTPStatus.FORBIDDEN, "this server answers to a local name only")
            return
        address = urlsplit(self.path)
        name = unquote(address.path).removeprefix("/")
        if not name:
            self._what_if(address.query)
        elif self.pages is not None and name in page_names(self.pages):
            self._send(HTTPStatus.OK, (self.pages / name).read_text(encoding="utf-8"))
        else:
            self._send(HTTPStatus.NOT_FOUND, f"there is no page {name!r} here")

    def _what_if(self, query: str) -> None:
        names = [] if self.pages is None else page_names(self.pages)
        question = Question()
        try:
            question = Question.of(query)
            with self.lock:
                sections = answer(question) if query else []
            status, text = HTTPStatus.OK, page(question, names, sections)
        except HeraldError as problem:
            status, text = HTTPStatus.BAD_REQUEST, page(question, names, [], str(problem))
        self._send(status, text)

    def _send(self, status: HTTPStatus, text: str) -> None:
        data = (text if text.startswith("<!doctype") else Markup("<!doctype html><p>{}</p>").format(text)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name is the base class's
        """Requests go to the command's progress, not to stderr by themselves."""
        self.say(format % arguments)


def page_names(folder: Path) -> list[str]:
    """Pages of a folder: its own HTML files, none below it."""
    return sorted(path.name for path in folder.glob("*.html") if path.is_file())


def open_server(port: int, pages: Path | None = None) -> ThreadingHTTPServer:
    """A server on the loopback interface; port 0 takes a free one.

    Raises
    ------
    ConfigError
        The port is taken, or there is no such folder.
    """
    if pages is not None and not pages.is_dir():
        message = f"--pages {pages}: there is no such folder"
        raise ConfigError(message)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, pages=pages))
    except (OSError, OverflowError) as problem:
        message = f"--port {port} cannot be used ({read_failure(problem)}); take another one, or 0 for any free one"
        raise ConfigError(message) from None
