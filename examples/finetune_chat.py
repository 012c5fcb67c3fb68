"""Fine-tune a tiny GPT on conversations: chat template, loss mask, packs.

    python examples/finetune_chat.py

1. Write conversations as JSONL and convert them to token ids with a loss mask, as does
   ``shard_tools convert chat.jsonl chat/ --tokenizer bytes --messages-field messages --chat-template chat.jinja``.
2. Pack them into rows of 128 tokens. Only what the assistant says has labels (``mask_field="mask"``).
3. Train until the loss on the answers has fallen, also on conversations that were held out. What the user says carries
   no loss. The picture shows the first batch, with what has labels, and the loss.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tiny_gpt import GPT, train_step

from infra import DeviceMesh
from shard_tools.make.tokens import TokenizeOptions, TokenizeReport, tokenize
from streaming import DataLoader, Packed, StreamingDataset

LENGTH, BATCH, NUM_CHATS = 128, 8, 300
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages -%}
{{ message.role[0] }}: {% if message.role == "assistant" %}{% generation %}{{ message.content }}{{ eos_token }}\
{% endgeneration %}{% else %}{{ message.content }}{% endif %}

{% endfor %}
{%- if add_generation_prompt %}a: {% endif -%}
"""


def conversations() -> list[list[dict[str, str]]]:
    """Give questions with their answers, two in each conversation."""
    return [
        [
            {"role": "user", "content": f"{number % 20} and {number // 20}?"},
            {"role": "assistant", "content": f"{number % 20 + number // 20} in all."},
            {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "You are welcome."},
        ]
        for number in range(NUM_CHATS)
    ]


def write_sets(folder: Path) -> TokenizeReport:
    """Write the conversations as token ids with a mask: nine of ten to train on, the others to compare."""
    if not (folder / "chat.jsonl").exists():
        (folder / "chat.jinja").write_text(TEMPLATE)
        lines = [json.dumps({"messages": chat}) + "\n" for chat in conversations()]
        (folder / "chat.jsonl").write_text("".join(lines))
    options = TokenizeOptions(
        tokenizer="bytes", messages_field="messages", chat_template=str(folder / "chat.jinja"), split=("val=10%",)
    )
    report = tokenize(str(folder / "chat.jsonl"), str(folder / "chat"), options=options)
    for one in report.sets:
        print(f"{one.name}: {one.num_documents} conversations, {one.num_tokens:,} tokens")
    return report


def open_packs(folder: Path, name: str) -> Packed:
    """Open one of the sets as packs with labels for the answers alone; -100 elsewhere."""
    documents = StreamingDataset(folder / "chat" / name, shuffle=name == "train")
    return Packed(documents, length=LENGTH, mask_field="mask", shift_labels=True)


@torch.inference_mode()
def loss_on(model: GPT, folder: Path, name: str) -> float:
    """Return the mean loss on the answers of a set."""
    total, num_labels = 0.0, 0
    with DataLoader(open_packs(folder, name), batch_size=BATCH, last_batch="partial") as loader:
        for batch in loader:
            total += float(model(batch).sum())
            num_labels += batch["num_labels"]
    return total / num_labels


def draw(batch: dict[str, torch.Tensor], losses: list[float], path: Path) -> None:
    """Draw where the first packs have labels (dark), tokens without (pale) or padding (white), and the loss."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1)
    kinds = (batch["document_ids"] >= 0).int() + 2 * (batch["labels"] != -100)
    above.imshow(kinds, aspect="auto", cmap="Blues", interpolation="nearest")
    above.set(title="the first batch: only what is dark has labels", xlabel="token", ylabel="pack")
    below.plot(losses)
    below.set(xlabel="step", ylabel="loss on the answers", ylim=(0, None))
    figure.savefig(path)
    print(f"picture: {path}")


def main(folder: Path, epochs: int) -> None:
    """Write the sets, train, and show that the loss on the answers falls."""
    folder.mkdir(parents=True, exist_ok=True)
    report = write_sets(folder)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more
    model = GPT(report.vocab_size, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = loss_on(model, folder, "val")
    first, losses, num_labels = None, [], 0
    mesh = DeviceMesh.from_sizes()  # one process here; under torchrun each rank would read its share
    with DataLoader(open_packs(folder, "train"), global_batch_size=BATCH, device_mesh=mesh) as loader:
        for _ in range(epochs):
            for batch in loader:
                first = first or batch
                num_labels += batch["num_labels"]
                losses.append(float(train_step(model, optimizer, batch)[0]))
    draw(first, losses, folder / "loss.png")
    print(f"loss on the answers: {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps, {num_labels:,} labels")
    after = loss_on(model, folder, "val")
    print(f"loss on answers that were held out: {before:.2f} to {after:.2f}")
    if losses[-1] > losses[0] / 2 or after > before / 2:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/finetune_chat"), help="folder to work in")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    main(given.out, given.epochs)
