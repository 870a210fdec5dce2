"""Prepares the data of GPT: definitions of Python's standard library, each a row of token ids."""

from __future__ import annotations

from byte_pairs import frame, train_bytes
from library_text import library_texts
from prepared import arguments, downloaded_tokenizer, save
from transformers import PreTrainedTokenizerFast


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Of GPT-2's kind: runs of bytes, <|endoftext|> after each text and to fill up."""
    tokenizer = train_bytes(texts, ["<|endoftext|>"])
    frame(tokenizer, begin="", end="<|endoftext|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def main() -> None:
    args = arguments("gpt")
    texts = library_texts(args.rows)
    tokenizer = downloaded_tokenizer(args.model_name_or_path) or make_tokenizer(texts)
    encoded = tokenizer(texts, truncation=True, max_length=args.block_size, padding="max_length", return_tensors="pt")
    save(args.folder, tokenizer, encoded)


if __name__ == "__main__":
    main()
