"""Writes a random Llama of 3 million parameters, with a tokenizer trained here. Nothing is downloaded.

  tiny_model.py DIRECTORY       (with the Python of the virtual environment that has vLLM)
"""
import random
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCABULARY, TOKENS_MAX = 4, 256, 8, 4, 2048, 8192


def main(directory):
    size = tokenizer(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=size, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HIDDEN // HEADS, max_position_embeddings=TOKENS_MAX, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False))
    # As initialised, all tokens are about equally likely. Scaled up, attention decides what comes out, and with it the KV cache.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0 if "lm_head" in name else 4.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    print(f"model: {sum(p.numel() for p in model.parameters())} parameters, {size} tokens, in {directory}")


def tokenizer(directory):
    """A byte-level one, of made-up words: prompts are token ids, so nobody reads what it writes. Returns its size."""
    source = random.Random(0)
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    words = ["".join(source.choice(syllables) for _ in range(source.randint(1, 4))) for _ in range(6000)]
    text = (" ".join(source.choice(words) for _ in range(200)) for _ in range(400))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)
    return len(fast)


if __name__ == "__main__":
    main(sys.argv[1])
