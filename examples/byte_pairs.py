"""Byte-pair tokenizers of the two kinds that language models use, trained on texts at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 8192
"""Most tokens of a tokenizer made here."""

BLANK = "▁"


def train_bytes(texts: Iterable[str], special_tokens: Sequence[str]) -> Tokenizer:
    """Tokens are runs of bytes, as in GPT-2, Llama 3 and Qwen: no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, texts, special_tokens, pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def train_pieces(texts: Iterable[str], special_tokens: Sequence[str]) -> Tokenizer:
    """Tokens are runs of characters with blanks as `▁`, and bytes where no run is known: Llama 2, Mistral, Baichuan 2.

    The first of `special_tokens` stands for what is unknown.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=special_tokens[0], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{BLANK}*[^{BLANK}\n]+|{BLANK}+|\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    _train(tokenizer, texts, [*special_tokens, *(f"<0x{byte:02X}>" for byte in range(256))], [])
    return tokenizer


def _train(tokenizer: Tokenizer, texts: Iterable[str], special_tokens: Sequence[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)


def frame(tokenizer: Tokenizer, begin: str, end: str) -> None:
    """Has every text begin and end with these special tokens; an empty name stands for none."""
    ends = [token for token in (begin, end) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(token for token in (begin, "$A", end) if token),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
    )
