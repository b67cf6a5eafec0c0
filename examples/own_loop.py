"""Train with TRIME's objective (Eq. 5) in your own PyTorch loop: a small GRU on the letters of this file."""

from pathlib import Path

import torch
from torch import nn

import trime

text = torch.tensor([*Path(__file__).read_bytes()])
width, length, rows = 64, 32, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.output = (
            nn.Embedding(256, width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, 256),
        )
        self.transform = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g, _ = self.read(self.embed(tokens))  # the keys of memories
        return g, self.output(self.transform(g))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for update in range(30):
    first = torch.randint(len(text) - length - 1, (rows,))
    batch = torch.stack([text[i : i + length + 1] for i in first.tolist()])
    g, logits = model(batch[:, :-1])
    loss = trime.trime_loss(g, logits, batch[:, 1:], visibility=trime.External())  # the other segments are memory as well
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 10 == 9:
        print(f"update {update + 1}: {loss.item():.3f} nats")
