"""Trains Llama 2: an ordinary PyTorch script for one device, and one line that makes all devices that one."""

from __future__ import annotations

import torch
from common import Meter, arguments, mask_pads
from families import load_model
from prepared import load_dataset, load_tokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader


def main() -> None:
    args = arguments("llama2")
    torch.moai.option.enable_advanced_parallelization()
    torch.manual_seed(0)

    tokenizer = load_tokenizer("llama2")
    model = load_model("llama2", args.model_name_or_path)
    dataset = load_dataset("llama2", args.block_size, model.config)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model.cuda().train()
    optimizer = AdamW(model.parameters(), lr=args.lr)
    meter = Meter(model, steps=args.epochs * len(loader))
    for _ in range(args.epochs):
        for input_ids, attention_mask in loader:
            loss = model(
                input_ids.cuda(),
                attention_mask=attention_mask.cuda(),
                labels=mask_pads(input_ids, attention_mask).cuda(),
                use_cache=False,
            ).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            meter.count(input_ids)
            if meter.step % args.log_interval == 0:
                torch.cuda.synchronize()  # the time of a step ends when the device has done all of it
                print(meter.line(loss.item()), flush=True)

    model.save_pretrained(args.save_path)
    tokenizer.save_pretrained(args.save_path)


if __name__ == "__main__":
    main()
