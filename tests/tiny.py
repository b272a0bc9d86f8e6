"""A tiny random model in a real folder, with a byte-level tokenizer and a chat template: logic without waiting."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<eos>", "<start>", "<end>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def save_tiny_model(folder: Path, context: int = 4096) -> Path:
    """Llama-shaped, 3 layers, a vocabulary of 256 bytes and three special tokens; says the same on every machine."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=[256, 258],
        pad_token_id=256,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
