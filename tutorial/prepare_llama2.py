"""Prepares the data of Llama 2: definitions of Python's standard library, each a row of token ids."""

from __future__ import annotations

from byte_pairs import frame, train_pieces
from library_text import library_texts
from prepared import arguments, downloaded_tokenizer, save
from transformers import PreTrainedTokenizerFast


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Of Llama 2's kind: pieces of words, each text between <s> and </s>, which also fills up."""
    tokenizer = train_pieces(texts, ["<unk>", "<s>", "</s>"])
    frame(tokenizer, begin="<s>", end="</s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def main() -> None:
    args = arguments("llama2")
    texts = library_texts(args.rows)
    tokenizer = downloaded_tokenizer(args.model_name_or_path) or make_tokenizer(texts)
    encoded = tokenizer(texts, truncation=True, max_length=args.block_size, padding="max_length", return_tensors="pt")
    save(args.folder, tokenizer, encoded)


if __name__ == "__main__":
    main()
