"""Text to token ids and back, and the chat template, of one model.

`load_tokenizer` takes a model folder (tokenizer.json, or a sentencepiece tokenizer.model) or a GGUF file, and needs only
the `tokenizers` package: transformers takes 0.8 s to import and adds nothing to a served model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zhilight.config.gguf import read_gguf
from zhilight.errors import ConfigError, RequestError
from zhilight.tokenization import chat_template as templating
from zhilight.tokenization.gguf_tokenizer import build_gguf_tokenizer
from zhilight.tokenization.sentencepiece_model import build_sentencepiece, read_sentencepiece_model
from zhilight.tokenization.token_bytes import LeadingSpace, byte_rule

if TYPE_CHECKING:
    import tokenizers

_ADDS_BOS_BY_CONFIG = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
"""Tokenizer classes (also with the suffix Fast) whose add_bos_token and add_eos_token overrule tokenizer.json."""


@dataclass(frozen=True)
class TokenizerSettings:
    """What stands beside the vocabulary: tokenizer_config.json, or a GGUF's metadata in its terms.

    special_tokens: bos_token, eos_token, unk_token, pad_token ... -> the token's text, for those the model has.
    add_bos, add_eos: whether encode(add_special_tokens=True) adds them; None leaves it to tokenizer.json.
    config: the remaining facts that `Tokenizer.info` shows.
    """

    special_tokens: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Tokenizer:
    """One model's tokenizer. Immutable, so every thread may use it; `encode` lets other threads run meanwhile."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings):
        self.backend = backend
        self.settings = settings
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self._rule = byte_rule(decoder)
        self._bytes: dict[int, bytes] = {}
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        """Ids are below it; added tokens included."""

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out with skip_special_tokens."""
        return self._special

    @property
    def leading_space(self) -> LeadingSpace:
        """What `decode` does with spaces at the very start of a text."""
        return self._rule.leading

    @property
    def chat_template(self) -> str | None:
        """The default template, or None when the model has none."""
        return self.settings.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised. Raises RequestError for a lone surrogate."""
        ours = add_special_tokens and self.settings.add_bos is not None
        try:
            # The batch call, unlike the single one, releases the interpreter's lock: other streams go on.
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens and not ours)
        except TypeError as error:  # the package's word for text that is not valid Unicode
            raise RequestError(f"the text is not valid Unicode: a lone surrogate stands at character {_surrogate(text)}. "
                               "Remove it.", param="prompt") from error
        if not ours:
            return encoding.ids
        before = [self.bos_token_id] if self.settings.add_bos and self.bos_token_id is not None else []
        after = [self.eos_token_id] if self.settings.add_eos and self.eos_token_id is not None else []
        return before + encoding.ids + after

    def decode(self, ids: list[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        """The text of `ids`, each broken byte sequence as U+FFFD; ids outside the vocabulary add nothing.

        `spaces_between_special_tokens` makes no difference: the decoders built here put none between tokens.
        """
        pieces = []
        for i in ids:
            if not (skip_special_tokens and i in self._special):
                pieces.append(self.token_bytes(i) if pieces else self.first_token_bytes(i))
        data = b"".join(pieces)
        if self.leading_space is LeadingSpace.STRIP_ONE and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        """The vocabulary's own form of one id ("Ġthe", "<0xE4>"); "" for an id without a token."""
        return self.backend.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """The id of one entry of the vocabulary in its own form, or None."""
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id adds to a text, its leading space included; b"" for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._rule(self.token(token_id))
        return data

    def first_token_bytes(self, token_id: int) -> bytes:
        """`token_bytes`, where the token opens the text (see LeadingSpace.DROP_FIRST_TOKEN)."""
        data = self.token_bytes(token_id)
        return data.replace(b" ", b"") if self.leading_space is LeadingSpace.DROP_FIRST_TOKEN else data

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                            documents: list[dict[str, Any]] | None = None, chat_template: str | None = None,
                            add_generation_prompt: bool = True, continue_final_message: bool = False,
                            **kwargs: Any) -> str:
        """The prompt text of a conversation. `chat_template` is a template's text, or the name of one of the model's.

        Raises RequestError: no template, a template's own complaint (param "messages"), or a bad combination.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt are both set, but the first goes on with "
                               "the last message and the second opens a new one. Set one of them.",
                               param="continue_final_message")
        template = templating.choose_template(self.settings.chat_templates, chat_template, bool(tools))
        variables = {**self.settings.special_tokens, "tools": tools, "documents": documents,
                     "add_generation_prompt": add_generation_prompt, **kwargs}
        return templating.render(template, messages, continue_final_message=continue_final_message, variables=variables)

    def info(self) -> dict[str, Any]:
        """Facts for /tokenizer_info, in the terms of tokenizer_config.json."""
        added = {str(i): {"content": token.content, "special": token.special} for i, token in sorted(self._added.items())}
        return {**self.settings.config, **self.settings.special_tokens, "vocab_size": self.vocab_size,
                "bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id, "chat_template": self.chat_template,
                "added_tokens_decoder": added}

    def _id_of(self, name: str) -> int | None:
        token = self.settings.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _surrogate(text: str) -> int:
    return next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), -1)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model folder, or the one inside a .gguf file.

    Raises ConfigError when there is none, UnsupportedModel for a kind that is not built (named in the message).
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path)
    if (path / "tokenizer.json").is_file():
        return Tokenizer(_read_backend(path / "tokenizer.json"), _read_settings(path))
    if (path / "tokenizer.model").is_file():
        return _from_sentencepiece(path)
    raise ConfigError(f"no tokenizer in {path}: neither tokenizer.json nor tokenizer.model is there, and it is no .gguf "
                      "file. Fetch the model's tokenizer files, or name another folder with the tokenizer setting.")


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"{path} cannot be read ({error}). Fetch it again; a newer `tokenizers` may be needed.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_settings(folder: Path) -> TokenizerSettings:
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    special = {name: text for name, value in named.items() if name.endswith("_token") and (text := _token_text(value))}
    tokenizer_class = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    ours = tokenizer_class in _ADDS_BOS_BY_CONFIG and isinstance(config.get("add_bos_token"), bool)
    facts = {name: value for name, value in config.items() if name not in ("chat_template", "added_tokens_decoder")}
    return TokenizerSettings(special, config["add_bos_token"] if ours else None,
                             bool(config.get("add_eos_token")) if ours else None,
                             _read_templates(folder, config), facts)


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: those of the config (a text, or a list of named ones), overruled by the .jinja files."""
    templates = {}
    match config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template"):
        case str(text):
            templates["default"] = text
        case list(entries):
            templates = {entry["name"]: entry["template"] for entry in entries}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object. Fetch it again.")
    return content


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _from_sentencepiece(folder: Path) -> Tokenizer:
    settings = _read_settings(folder)
    model = read_sentencepiece_model(folder / "tokenizer.model")
    backend = build_sentencepiece(model)
    _add_tokens(backend, folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special = {name: token for name, token in special.items() if token in model.pieces} | settings.special_tokens
    add_bos = True if settings.add_bos is None else settings.add_bos
    return Tokenizer(backend, TokenizerSettings(special, add_bos, bool(settings.add_eos), settings.chat_templates,
                                                settings.config))


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Tokens that a fine-tune added beside its tokenizer.model; their ids must follow the vocabulary's."""
    from tokenizers import AddedToken

    decoder = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    added = {entry["content"]: (int(i), bool(entry.get("special"))) for i, entry in decoder.items()}
    for token, i in _read_json(folder / "added_tokens.json").items():
        added.setdefault(token, (i, False))
    for token, (i, special) in sorted(added.items(), key=lambda item: item[1]):
        entry = AddedToken(token, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([entry])
        if backend.token_to_id(token) != i:
            raise ConfigError(f"{folder}: added token {token!r} has id {i}, but follows the vocabulary as "
                              f"{backend.token_to_id(token)}. Fetch the model's tokenizer.json.")


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf(path).metadata
    built = build_gguf_tokenizer(metadata, str(path))
    special = {f"{name}_token": token for name, i in built.special_ids.items() if (token := built.backend.id_to_token(i))}
    config = {"tokenizer_class": f"gguf:{metadata['tokenizer.ggml.model']}", "pre": metadata.get("tokenizer.ggml.pre"),
              "add_bos_token": built.add_bos, "add_eos_token": built.add_eos,
              "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length")}
    return Tokenizer(built.backend, TokenizerSettings(special, built.add_bos, built.add_eos, built.chat_templates, config))
