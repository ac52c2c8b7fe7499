"""Pictures before and after restoration, and classical denoisers beside the model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure

from vision.callbacks.figures import BLUE, PLAIN, VERMILLION, short

Denoiser = Callable[[Float[np.ndarray, "h w c"], float], Float[np.ndarray, "h w c"]]


class Baselines(Callback):
    """Adds classical denoisers to the table of a test: wavelets and non-local means of scikit-image, BM3D where it is installed.

    For Gaussian noise of a known, fixed sigma (`task.sigma`). A package that is missing is told once and its row left out:
    `pip install "vision-core[bench]"` brings scikit-image; `bm3d` has a licence for non-commercial use only and is never
    installed along. BM3D takes longest.

    Args:
        bm3d: whether BM3D is tried.
    """

    def __init__(self, bm3d: bool = True) -> None:
        self.bm3d = bm3d
        self.denoisers: dict[str, Denoiser] = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(pl_module, "sigma", None) is None:
            rank_zero_warn("no classical denoisers beside the model: they are for Gaussian noise of one known sigma")
            self.denoisers = {}
            return
        wanted = {"wavelets": ("pywt", wavelets), "non-local means": ("skimage", non_local_means), "BM3D": ("bm3d", bm3d)}
        if not self.bm3d:
            del wanted["BM3D"]
        needed = {name: [*(["skimage"] if name != "BM3D" else []), package] for name, (package, _) in wanted.items()}
        missing = {name: next((p for p in needed[name] if importlib.util.find_spec(p) is None), None) for name in wanted}
        for name, package in missing.items():
            if package:
                print(f"no row for {name}: {package} is not installed", flush=True)
        self.denoisers = {name: denoise for name, (_, denoise) in wanted.items() if not missing[name]}

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not self.denoisers:
            return
        task: Any = pl_module
        degraded, clean, names = batch
        noisy = degraded[0].permute(1, 2, 0).double().cpu().numpy()
        for method, denoise in self.denoisers.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old packages about new ones
                found = denoise(noisy, task.sigma / 255)
            restored = torch.from_numpy(np.array(found, dtype=np.float32)).permute(2, 0, 1)[None]
            task.score(str(names[0]), method, restored.to(clean), clean)


def wavelets(noisy: Float[np.ndarray, "h w c"], sigma: float) -> Float[np.ndarray, "h w c"]:
    """BayesShrink (Chang et al. 2000) with scikit-image's defaults; colours as luma and chroma."""
    from skimage.restoration import denoise_wavelet

    if noisy.shape[-1] == 1:
        return denoise_wavelet(noisy[..., 0], sigma=sigma)[..., None]
    return denoise_wavelet(noisy, sigma=sigma, convert2ycbcr=True, channel_axis=-1)


def non_local_means(noisy: Float[np.ndarray, "h w c"], sigma: float) -> Float[np.ndarray, "h w c"]:
    """Buades et al. 2005, the fast form as scikit-image's documentation has it: patches of 5, distance 6, h 0.8 sigma."""
    from skimage.restoration import denoise_nl_means

    gray = noisy.shape[-1] == 1
    options = {"patch_size": 5, "patch_distance": 6, "h": 0.8 * sigma, "sigma": sigma, "fast_mode": True}
    found = denoise_nl_means(noisy[..., 0] if gray else noisy, channel_axis=None if gray else -1, **options)
    return found[..., None] if gray else found


def bm3d(noisy: Float[np.ndarray, "h w c"], sigma: float) -> Float[np.ndarray, "h w c"]:
    """Dabov et al. 2007, of the authors' package; colours as luma and chroma."""
    import bm3d

    if noisy.shape[-1] == 1:
        return bm3d.bm3d(noisy[..., 0], sigma)[..., None]
    return bm3d.bm3d_rgb(noisy, sigma)


def before_and_after(panels: Sequence[Any], before: str) -> Figure:
    """A row for each picture: as it came, restored, clean.

    Args:
        panels: with name, before, after, clean (`c h w` in 0..1) and before_psnr, after_psnr of the whole picture.
        before: what the first column is called.
    """
    figure = Figure(figsize=(8.4, 2.95 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), 3, squeeze=False), panels, strict=True):
        columns = (
            (panel.before, f"{before}  {panel.before_psnr:.2f} dB", VERMILLION),
            (panel.after, f"restored  {panel.after_psnr:.2f} dB", BLUE),
            (panel.clean, f"clean  {short(panel.name)}", "black"),
        )
        for axis, (picture, title, colour) in zip(axes, columns, strict=True):
            pixels = picture.permute(1, 2, 0).numpy()
            gray = pixels.shape[-1] == 1
            axis.imshow(
                pixels[..., 0] if gray else pixels, cmap="gray" if gray else None, vmin=0, vmax=1, interpolation="nearest"
            )
            axis.set_title(title, fontsize=9, loc="left", color=colour, **PLAIN)
            axis.axis("off")
    return figure
