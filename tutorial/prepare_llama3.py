"""Prepares the data of Llama 3: definitions of Python's standard library, each a row of token ids."""

from __future__ import annotations

from byte_pairs import frame, train_bytes
from library_text import library_texts
from prepared import arguments, downloaded_tokenizer, save
from transformers import PreTrainedTokenizerFast


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Of Llama 3's kind: runs of bytes, each text between two special tokens, the second of which also fills up."""
    tokenizer = train_bytes(texts, ["<|begin_of_text|>", "<|end_of_text|>"])
    frame(tokenizer, begin="<|begin_of_text|>", end="<|end_of_text|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
    )


def main() -> None:
    args = arguments("llama3")
    texts = library_texts(args.rows)
    tokenizer = downloaded_tokenizer(args.model_name_or_path) or make_tokenizer(texts)
    encoded = tokenizer(texts, truncation=True, max_length=args.block_size, padding="max_length", return_tensors="pt")
    save(args.folder, tokenizer, encoded)


if __name__ == "__main__":
    main()
