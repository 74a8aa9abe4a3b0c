"""Loading from every kind of file, ids against golden ones, exact bytes, special tokens."""

from __future__ import annotations

import json
import threading
import time

import pytest

from zhilight.errors import ConfigError, RequestError, UnsupportedModel
from zhilight.tokenization.token_bytes import byte_level_alphabet, byte_rule
from zhilight.tokenization.tokenizer import load_tokenizer

# Made with transformers 5.24 from the same vocabulary.
GOLDEN = {
    "I have 1234 apples.\n\n  def f(x):\treturn x**2  # café, 你好 🤗": [
        57, 457, 216, 33, 34, 35, 36, 13855, 30, 8866, 753, 275, 24, 104, 727, 197, 5406, 1792, 828, 34, 216, 907, 37366,
        28, 216, 18645, 250, 48392, 138, 15107, 114, 241],
    "It's   a test-case: naïve\r\n": [1589, 506, 256, 253, 1028, 29, 7544, 42, 15486, 46494, 2738],
}
PROMPT = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
          "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
PROMPT_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
              198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def folder(demo_tokenizer, tmp_path_factory):
    """The demo tokenizer as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("folder")
    demo_tokenizer.backend.save(str(folder / "tokenizer.json"))
    write_config(folder, eos_token={"content": "<|im_end|>"}, bos_token="<|im_start|>", chat_template="{{ bos_token }}x")
    return folder


def write_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_ids_equal_transformers(demo_tokenizer):
    for text, ids in GOLDEN.items():
        assert demo_tokenizer.encode(text) == ids
        assert demo_tokenizer.decode(ids) == text
    assert demo_tokenizer.encode(PROMPT) == PROMPT_IDS
    assert demo_tokenizer.decode(PROMPT_IDS, skip_special_tokens=False) == PROMPT


def test_special_tokens_of_the_gguf(demo_tokenizer):
    assert demo_tokenizer.vocab_size == 49152
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.eos_token_id) == (1, 2)
    assert demo_tokenizer.all_special_ids == frozenset(range(17))
    assert demo_tokenizer.decode([2, 504, 2]) == "The"


def test_a_folder_reads_as_the_gguf_does(folder, demo_tokenizer):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(PROMPT) == PROMPT_IDS
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.apply_chat_template([]) == "<|im_start|>x"
    assert tokenizer.info()["added_tokens_decoder"]["2"] == {"content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(("tokenizer_class", "expected"), [("LlamaTokenizerFast", [1, 504, 2]), ("LlamaTokenizer", [1, 504, 2]),
                                                           ("Qwen2TokenizerFast", [504])])
def test_llama_classes_add_the_tokens_their_config_names(folder, tokenizer_class, expected):
    write_config(folder, eos_token="<|im_end|>", bos_token="<|im_start|>", tokenizer_class=tokenizer_class,
                 add_bos_token=True, add_eos_token=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("The") == expected
    assert tokenizer.encode("The", add_special_tokens=False) == [504]


def test_truncation_and_padding_of_the_file_are_off(folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).encode(PROMPT) == PROMPT_IDS


def test_token_bytes_rebuild_split_characters(tokenizer):
    text = " 🤗 hello 你好"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined.decode().removeprefix("" if tokenizer.bos_token_id is None else " ").strip() == text.strip()
    assert len([i for i in ids if tokenizer.token(i)]) == len(ids)
    assert any(not is_utf8(tokenizer.token_bytes(i)) for i in ids)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_vocabulary_form_and_ids_without_a_token(demo_tokenizer, sentencepiece_tokenizer):
    assert demo_tokenizer.token(demo_tokenizer.encode(" the")[0]) == "Ġthe"
    assert sentencepiece_tokenizer.token(3 + 0xE4) == "<0xE4>"
    assert sentencepiece_tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert (demo_tokenizer.token(60000), demo_tokenizer.token_bytes(60000)) == ("", b"")
    assert demo_tokenizer.decode([60000, 504]) == "The"


def test_byte_level_alphabet_is_gpt2s():
    from tokenizers import pre_tokenizers

    table = byte_level_alphabet()
    assert sorted(table.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert table[ord(" ")] == "Ġ" and table[ord("\n")] == "Ċ" and len(table) == 256


def test_metaspace_drops_the_first_tokens_spaces():
    from tokenizers import Tokenizer, decoders, models

    from zhilight.tokenization.tokenizer import Tokenizer as Ours
    from zhilight.tokenization.tokenizer import TokenizerSettings

    backend = Tokenizer(models.BPE(vocab={"▁▁a": 0, "▁b": 1, "c": 2}, merges=[], unk_token="c"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Ours(backend, TokenizerSettings())
    for ids in ([0, 0, 1, 2], [1, 0], [2, 1], []):
        assert tokenizer.decode(ids) == backend.decode(ids)


def test_byte_tokens_are_bytes_only_where_the_decoder_says_so():
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    assert byte_rule({"type": "Sequence", "decoders": [replace, {"type": "Fuse"}]})("<0xE4>") == b"<0xE4>"
    assert byte_rule({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}]})("<0xE4>") == b"\xe4"


def test_an_unknown_decoder_is_named():
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        byte_rule({"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(UnsupportedModel, match="None"):
        byte_rule(None)


def test_a_lone_surrogate_is_the_clients_fault(demo_tokenizer):
    with pytest.raises(RequestError, match="character 2"):
        demo_tokenizer.encode("ab\ud800")


def test_missing_and_damaged_files_say_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_other_threads_run_while_a_long_text_is_encoded(demo_tokenizer):
    text = "The quick brown fox jumps over the lazy dog, 你好. " * 20000
    gaps, done = [], threading.Event()

    def tick():
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    demo_tokenizer.encode(text)
    took = time.perf_counter() - start
    done.set()
    thread.join()
    assert took > 0.1, "too short a text to show anything"
    assert max(gaps) < took / 2
