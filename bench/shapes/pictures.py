"""Scripts with convolutions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 20


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def classifier() -> nn.Sequential:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(Block(3, 16), Block(16, 32, 2), Block(32, 32, 2), *pool)


def evaluation_in_the_loop(device: str) -> Iterator[float]:
    """A convolutional classifier with batch norm, evaluated after every epoch."""
    model = classifier().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
    for step in range(STEPS):
        model.train()
        loss = F.cross_entropy(model(torch.randn(16, 3, 24, 24).to(device)), torch.randint(10, (16,)).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss.item()
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                yield model(torch.randn(8, 3, 24, 24).to(device)).square().mean().item()


def curriculum_of_image_sizes(device: str) -> Iterator[float]:
    """The side of the images grows during training."""
    model = classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        side = 16 + 4 * (step // 5)
        loss = F.cross_entropy(model(torch.randn(16, 3, side, side).to(device)), torch.randint(10, (16,)).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def adversarial_with_two_optimizers(device: str) -> Iterator[float]:
    """A generator and a discriminator in turns."""
    generator = nn.Sequential(
        nn.Linear(16, 32 * 16),
        nn.Unflatten(1, (32, 4, 4)),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
        nn.Tanh(),
    ).to(device)
    critic = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.Flatten(), nn.Linear(512, 1)
    ).to(device)
    ours = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    theirs = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    ones, zeros = torch.ones(16, 1).to(device), torch.zeros(16, 1).to(device)
    for _ in range(STEPS):
        real, noise = torch.randn(16, 3, 16, 16).to(device), torch.randn(16, 16).to(device)
        fake = generator(noise)
        real_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        critic_loss = real_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        theirs.zero_grad()
        critic_loss.backward()
        theirs.step()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        ours.zero_grad()
        loss.backward()
        ours.step()
        yield critic_loss.item() + loss.item()


def variational_autoencoder(device: str) -> Iterator[float]:
    """Noise in the middle of the model, two terms of the loss."""
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)
    decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784)).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for _ in range(STEPS):
        x, noise = torch.rand(32, 1, 28, 28).to(device), torch.randn(32, 16).to(device)
        mean, log_variance = encoder(x).chunk(2, dim=-1)
        logits = decoder(mean + noise * (log_variance / 2).exp())
        rebuilt = F.binary_cross_entropy_with_logits(logits, x.flatten(1), reduction="sum")
        loss = rebuilt - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item() / 32


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = Block(3, 16), Block(16, 32, 2), Block(48, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        deep = F.interpolate(self.deep(first), scale_factor=2, mode="nearest")
        return self.head(self.up(torch.cat([first, deep], dim=1)))


def segmentation(device: str) -> Iterator[float]:
    """A U-Net with skip connections and a loss for every pixel."""
    model = UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(8, 3, 32, 32).to(device), torch.randint(2, (8, 32, 32)).to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def diffusion(device: str) -> Iterator[float]:
    """Predicts the noise of images at random times."""
    model = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.linspace(0.999, 0.01, 100).to(device)
    for _ in range(STEPS):
        x, noise = torch.randn(16, 3, 16, 16).to(device), torch.randn(16, 3, 16, 16).to(device)
        times = torch.randint(100, (16,)).to(device)
        share = kept[times][:, None, None, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        clock = (times / 100)[:, None, None, None].expand(-1, 1, 16, 16)
        loss = F.mse_loss(model(torch.cat([noisy, clock], dim=1)), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


SCRIPTS = (
    evaluation_in_the_loop,
    curriculum_of_image_sizes,
    adversarial_with_two_optimizers,
    variational_autoencoder,
    segmentation,
    diffusion,
)
