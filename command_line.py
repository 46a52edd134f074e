"""What the scripts share that is not the method: options from a file and flags, one-line errors, whole files."""

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import yaml


class InputError(Exception):
    """Something the user gave cannot be used. Its text is the one line they see; the scripts then end with status 2."""


def first_line(error) -> str:
    """An exception as one line of text."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        reason = str(error.strerror)
        return " ".join(f"{error.filename}: {reason[:1].lower()}{reason[1:]}".split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0]


def listed(ids: list[str], count: int) -> str:
    """The first ids for a terminal: on one line, of bounded length and without control characters, whatever they are."""
    return ", ".join(repr(name[:60])[1:-1] for name in ids[:count])


def option(default, help, low=None, high=None, choices=None, section=None):
    """A dataclass field with what --help and the checks need."""
    return dataclasses.field(default=default, metadata=dict(help=help, low=low, high=high, choices=choices, section=section))


def parse_options(kind, argv: list[str], needed: tuple[str, ...] = ()):
    """`[CONFIG.yaml] [--flag value ...]` as an instance of the dataclass `kind`: flags over file over defaults.

    Raises InputError for unknown names (with the nearest known one), values of the wrong type or out of bounds, and
    options in `needed` that are not given.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    settings = {"description": sys.modules["__main__"].__doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(usage="%(prog)s [CONFIG.yaml] [--option value ...]", allow_abbrev=False, **settings)
    parser.error = lambda message: (_ for _ in ()).throw(InputError(message))
    parser.add_argument("config_file", nargs="?", metavar="CONFIG.yaml", help="a file with any of the options below")
    group = parser
    for field in fields.values():
        group = parser.add_argument_group(field.metadata["section"]) if field.metadata["section"] else group
        shown = f" (default: {field.default})" if field.default != "" and field.default is not False else ""
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=to_bool if field.type is bool else field.type,
            nargs="?" if field.type is bool else None,
            const=True if field.type is bool else None,
            default=argparse.SUPPRESS,
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else field.type.__name__.upper(),
            help=field.metadata["help"] + shown,
        )
    argv = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv]  # --a_b is --a-b
    given, unknown = parser.parse_known_args(argv)
    from_file = read_yaml(given.config_file) if given.config_file and not unknown else {}
    for name in [*unknown, *from_file]:
        plain = str(name).split("=")[0].lstrip("-").replace("-", "_")
        if plain not in fields:
            near = difflib.get_close_matches(plain, fields, n=1, cutoff=0.5)
            raise InputError(f"unknown option {name!r}" + (f"; is {near[0]!r} meant?" if near else ""))
    as_flags = [f"--{name.replace('_', '-')}={value}" for name, value in from_file.items() if value is not None]
    given = {**vars(parser.parse_args(as_flags)), **vars(given)}
    options = kind(**{name: value for name, value in given.items() if name in fields})
    for name, field in fields.items():
        value, low, high = getattr(options, name), field.metadata["low"], field.metadata["high"]
        if low is not None and not (low <= value <= (high if high is not None else sys.float_info.max)):
            upper = f" and at most {high}" if high is not None else ""
            raise InputError(f"--{name.replace('_', '-')} is {value}, expected at least {low}{upper}")
        if name in needed and not value:
            raise InputError(f"--{name.replace('_', '-')} is needed: {field.metadata['help']}")
    return options


def to_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def read_yaml(path: str) -> dict:
    text = read_text(path)
    try:
        settings = yaml.safe_load(text)
    except Exception as error:  # YAML has errors of its own, and others for values such as 2024-13-45
        raise InputError(f"{path}: cannot be read as YAML: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path}: expected lines of the form 'option: value', found {settings!r:.60}")
    return settings


def read_text(path) -> str:
    """A file's text, UTF-8 with or without a mark at its start. Raises InputError that names it."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(first_line(error)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected text in UTF-8: {first_line(error)}") from error
    except ValueError as error:  # no name that a file can have
        raise InputError(f"{path!r}: no such file: {first_line(error)}") from error


def write_file(path: Path, text: str):
    """Write beside it, then rename: nobody ever finds half a file."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_lines(path: Path, rows):
    """Write JSON Lines, whole or not at all."""
    write_file(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))


@contextlib.contextmanager
def until_signal():
    """Yields a list that Ctrl-C and SIGTERM put their number into, once; a second one ends the process at once."""
    came, numbers = [], (signal.SIGINT, signal.SIGTERM)

    def note(number, frame):
        came.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield came
        return
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def run(main):
    """Run a script's main: what the user can mend ends in one line on standard error and status 2, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # ids in any script, on a terminal or in a log that knows only ASCII
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:])
    except (InputError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
