"""Make tests/golden/*.npz and demo.json with transformers and torch (neither is needed to run the tests).

    python tests/golden/make_golden.py [SMOLLM2_FOLDER]

models.npz  logits [tokens, vocabulary] float32 of each tiny random model of tiny.py
ropes.npz   cosines and sines [positions, head_dim] of each rope kind
demo.json   with a Hugging Face folder of the demo model (SmolLM2-135M-Instruct, its Q4_1 GGUF dequantised to bf16):
            greedy tokens, ten most probable first tokens and prompt log-probabilities in float32
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tiny import BASE, MODELS, ROPE_HEAD_DIM, ROPE_MAX_POSITIONS, ROPES, tiny_weights, token_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a short story about a dog who learns to swim."}],
    [{"role": "system", "content": "You are a helpful assistant."},
     {"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    [{"role": "user", "content": "Write a Python function that returns the sum of a list of numbers."}],
    [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello! How can I help you today?"},
     {"role": "user", "content": "List three fruits."}],
]
TEXTS = ["Once upon a time", "The quick brown fox jumps over the lazy dog. 12345 + 678 =", "def fibonacci(n):\n    "]


def tiny_model_logits(config: dict) -> np.ndarray:
    keys = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    model_config = transformers.AutoConfig.for_model(**keys)
    model_config._attn_implementation = "eager"
    model = getattr(transformers, config["architectures"][0])(model_config).float().eval()
    state = {name: torch.from_numpy(weight) for name, weight in tiny_weights(config).items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.from_numpy(token_ids())[None]).logits[0].numpy()


def rope_tables(name: str, scaling: dict) -> dict[str, np.ndarray]:
    limit = ROPE_MAX_POSITIONS.get(name, 256)
    config = LlamaConfig(**{**BASE, "hidden_size": 4 * ROPE_HEAD_DIM, "head_dim": ROPE_HEAD_DIM,
                            "max_position_embeddings": limit, "rope_scaling": dict(scaling)})
    tables = {}
    for length in (64, 256):  # within and beyond the original length: dynamic and longrope choose by it
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        half = ROPE_HEAD_DIM // 2
        tables[f"{name}_{length}"] = torch.cat((cos[0, ::3, :half], sin[0, ::3, :half]), -1).numpy()
    return tables


def demo_item(model, tokenizer, prompt: str) -> dict:
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0].float(), -1)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32,
                                pad_token_id=tokenizer.pad_token_id)
    top = torch.topk(log_probs[-1], 10)
    return {
        "prompt": prompt,
        "prompt_ids": ids[0].tolist(),
        "greedy_ids": output[0, ids.shape[1]:].tolist(),
        "greedy_text": tokenizer.decode(output[0, ids.shape[1]:]),
        "top_ids": top.indices.tolist(),
        "top_logprobs": [round(value, 5) for value in top.values.tolist()],
        "prompt_logprobs": [round(x, 4) for x in log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()],
    }


def main() -> None:
    np.savez_compressed(HERE / "models.npz", **{name: tiny_model_logits(config) for name, config in MODELS.items()})
    ropes: dict[str, np.ndarray] = {}
    for name, scaling in ROPES.items():
        ropes |= rope_tables(name, scaling)
    np.savez_compressed(HERE / "ropes.npz", **ropes)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
        items = [demo_item(model, tokenizer, prompt) for prompt in prompts + TEXTS]
        document = {"transformers": transformers.__version__, "torch": torch.__version__, "items": items}
        (HERE / "demo.json").write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
