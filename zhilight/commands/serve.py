"""`zhilight serve MODEL`: the OpenAI server."""

from __future__ import annotations

import argparse

from zhilight.server.arguments import add_server_arguments, configs_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    configs = configs_from(arguments)  # before the imports below: a bad flag is reported at once
    from zhilight.server.openai.entrypoints.api_server import run_server

    return run_server(*configs)
