"""unet.cu's recipe, 200 steps in float32 beside an equal PyTorch model: same order, times and noise, loss by loss."""

import numpy as np
import pytest

from cudiff.config import PRESETS
from cudiff.convert import to_torch
from cudiff.data import Dataset
from cudiff.train import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")

from tests.models.torch_unet import TorchUNet  # noqa: E402

STEPS = 200
SMALL = dict(image_size=8, model_channels=32, channel_mult=(1, 2), attention_resolutions=(4,), batch_size=8)
ARCHITECTURE = ("image_size", "model_channels", "channel_mult", "num_res_blocks", "attention_resolutions",
                "num_head_channels", "conv_resample", "use_new_attention_order", "max_period")


def blobs(rng, count, size):
    """Pictures of soft discs, uint8."""
    places, axis = rng.uniform(0, size, (count, 1, 1, 3, 2)), np.arange(size)
    distance = (axis[:, None, None] - places[..., 0]) ** 2 + (axis[None, :, None] - places[..., 1]) ** 2
    return (255 * np.exp(-distance / (size / 3) ** 2)).astype(np.uint8)


class Twin:
    """The same model in PyTorch, trained by its AdamW with what it is given; the schedule is unet.cu's own."""

    def __init__(self, trainer, device):
        config = trainer.config
        self.net = TorchUNet(**{name: getattr(config, name) for name in ARCHITECTURE}).to(device)
        state = to_torch(trainer.net.state_dict(), trainer.net.layouts())
        self.net.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, weight_decay=0.0)
        self.kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).to(device)

    def step(self, images, t, noise):
        device = self.kept.device
        images, noise = (torch.tensor(x.numpy().transpose(0, 3, 1, 2), device=device) for x in (images, noise))
        t = torch.tensor(t.numpy(), device=device).long()
        kept = self.kept[t][:, None, None, None]
        x = images * kept.sqrt().float() + noise * (1 - kept).sqrt().float()
        self.optimizer.zero_grad()
        loss = ((self.net(x, t.float()) - noise) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.slow
def test_losses_step_by_step(device, tmp_path, rng, monkeypatch):
    compare(SMALL, device, tmp_path, rng, monkeypatch)


@pytest.mark.gpu
def test_losses_step_by_step_of_the_whole_model(tmp_path, rng, monkeypatch):
    compare({}, "cuda", tmp_path, rng, monkeypatch)


def compare(changes, device, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    config = PRESETS["unet-cu"].replace(**changes, device=device, capture=False, sample_every=0, residency="device")
    trainer = Trainer(config, Dataset(blobs(rng, 100, config.image_size)), tmp_path)
    twin, given = Twin(trainer, device), []
    diffuse = trainer.loss.q_sample
    monkeypatch.setattr(trainer.loss, "q_sample", lambda *drawn: given.append(drawn) or diffuse(*drawn))
    ours, theirs = [], []
    for _ in range(STEPS):
        total = trainer.train_step()
        ours.append(total.item())
        total.data[...] = 0
        theirs.append(twin.step(*given.pop()))
    assert len({round(loss, 3) for loss in ours}) > STEPS / 4  # other noise in each
    assert np.mean(ours[-20:]) < 0.5 * np.mean(ours[:20])  # they learn
    np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=0)
