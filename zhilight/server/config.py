"""Settings of the HTTP server; those of the engine are `zhilight.config.EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zhilight.errors import ConfigError

_OPTIONAL_AUTO = ("auto", "none")


def _option(default: Any, help: str, *, choices: tuple | None = None, aliases: tuple[str, ...] = (),
            negative_aliases: tuple[str, ...] = (), secret: bool = False) -> Any:
    metadata = {"help": help, "choices": choices, "aliases": aliases, "negative_aliases": negative_aliases}
    if isinstance(default, tuple):
        return field(default_factory=lambda: default, metadata=metadata, repr=not secret)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server. Raises ConfigError when a value cannot be honoured."""

    host: str = _option("0.0.0.0", "address to listen on")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = _option(None, "path of a unix socket to listen on, instead of host and port")
    served_model_name: tuple[str, ...] = _option((), "names the model answers to; the first one is what answers carry")
    api_key: tuple[str, ...] = _option((), "keys clients must present (Authorization: Bearer KEY); also read from the "
                                           "environment variable ZHILIGHT_API_KEY, comma-separated", secret=True)
    ssl_keyfile: str | None = _option(None, "TLS private key, PEM")
    ssl_certfile: str | None = _option(None, "TLS certificate chain, PEM")
    ssl_ca_certs: str | None = _option(None, "CA file; when given, clients must present a certificate signed by it")
    root_path: str = _option("", "path prefix under which a reverse proxy publishes the server")
    allowed_origins: tuple[str, ...] = _option(("*",), "CORS: origins that browsers may call from")
    allowed_methods: tuple[str, ...] = _option(("*",), "CORS: allowed methods")
    allowed_headers: tuple[str, ...] = _option(("*",), "CORS: allowed request headers")
    allow_credentials: bool = _option(False, "CORS: allow credentials")
    response_role: str = _option("assistant", "role of generated chat messages")
    chat_template: str | None = _option(None, "chat template: a file, or the Jinja text itself")
    trust_request_chat_template: bool = _option(
        False, "let requests bring a chat_template of their own (rendered in a sandbox)")
    tool_call_parser: str | None = _option("auto", "how the model writes tool calls: hermes, llama3_json, mistral, "
                                                   "deepseek_v3 ...; auto looks at the chat template, none is off")
    enable_auto_tool_choice: bool = _option(True, "tool_choice auto, when a tool parser is known")
    reasoning_parser: str | None = _option(None, "how the model writes its reasoning: deepseek_r1 or qwen3")
    enable_reasoning: bool = _option(False, "turn reasoning parsing on; deepseek_r1 when no parser is named")
    generation_config: str = _option("auto", "auto takes sampling defaults from the model's generation_config.json",
                                     choices=_OPTIONAL_AUTO)
    return_tokens_as_token_ids: bool = _option(False, "write tokens of log-probabilities as token_id:N in all answers")
    log_requests: bool = _option(False, "log each request's parameters and lengths (never its text)",
                                 aliases=("--enable-log-requests",), negative_aliases=("--disable-log-requests",))
    access_log: bool = _option(True, "one log line an HTTP request", negative_aliases=(
        "--disable-access-log", "--disable-uvicorn-access-log"))
    log_level: str = _option("info", "log level", choices=("debug", "info", "warning", "error"),
                             aliases=("--uvicorn-log-level",))
    max_body_mb: int = _option(32, "largest request body, in MiB; a larger one is answered 413")
    max_connections: int = _option(8192, "open connections; more are answered 503 and closed")
    header_timeout: float = _option(20.0, "seconds a new connection has to send its first request's headers")
    body_timeout: float = _option(60.0, "seconds a request's body may take to arrive")
    keepalive_timeout: float = _option(75.0, "seconds an idle connection is kept")
    stall_timeout: float = _option(60.0, "seconds a streaming client may stop reading before its request is aborted")
    thread_pool_size: int = _option(4, "threads that render templates, tokenize and compile grammars")
    playground: bool = _option(True, "serve the page at / and the API page at /docs", aliases=("--enable-playground",),
                               negative_aliases=("--disable-playground",))

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 (any free port) to 65535.")
        for name in ("max_body_mb", "max_connections", "thread_pool_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("header_timeout", "body_timeout", "keepalive_timeout", "stall_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: give both or neither.")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs needs ssl_keyfile and ssl_certfile.")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}; it must start with / and not end with it.")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("api_key holds an empty key; leave the option out to serve without keys.")
        if any(not name for name in self.served_model_name):
            raise ConfigError("served_model_name holds an empty name.")
