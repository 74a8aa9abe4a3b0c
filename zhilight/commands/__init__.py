"""The subcommands of `zhilight`, one module each: `add_arguments(parser)` and `main(arguments) -> exit code`."""
