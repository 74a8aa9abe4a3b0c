"""`zhilight serve | generate | chat | doctor | kernels`.

Each command is a module with `add_arguments(parser)` and `main(arguments) -> exit code`, imported only when it is used. A
ZhiLightError is printed as one plain message: exit code 2 for a bad setting, 1 for anything else.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from zhilight.errors import ConfigError, RequestError, ZhiLightError
from zhilight.version import __version__

COMMANDS = {
    "serve": ("zhilight.commands.serve", "serve a model with the OpenAI API"),
    "generate": ("zhilight.commands.generate", "complete prompts and print the texts"),
    "chat": ("zhilight.commands.chat", "talk to a model in the terminal"),
    "doctor": ("zhilight.driver.doctor", "examine this machine: GPUs, driver, libraries"),
    "kernels": ("zhilight.driver.kernels_cli", "list, compile or report the GPU kernels"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from zhilight.server.arguments import PlainErrorParser, normalise_flags

    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"zhilight {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise ConfigError(f"there is no command {words[0]!r}. Commands: {', '.join(COMMANDS)}.")
        module_name, summary = COMMANDS[words[0]]
        module = importlib.import_module(module_name)
        parser = PlainErrorParser(prog=f"zhilight {words[0]}", description=summary, allow_abbrev=False)
        module.add_arguments(parser)
        return module.main(parser.parse_args(normalise_flags(words[1:])))
    except ZhiLightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RequestError)) else 1
    except ModuleNotFoundError as error:
        if (error.name or "zhilight").partition(".")[0] == "zhilight":
            raise
        print(f"the package {error.name} is not installed, and ZhiLight needs it. `zhilight doctor` says what else is missing "
              "and how to get it.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away. Point stdout elsewhere, so that the interpreter's last flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: zhilight COMMAND ...", "", "commands:", *lines, "",
                      'zhilight COMMAND --help shows its flags; "demo" is a model that is always at hand.'])


if __name__ == "__main__":
    sys.exit(main())
