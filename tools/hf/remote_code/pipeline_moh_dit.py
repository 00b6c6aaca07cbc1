"""Generates images of classes with a MoH-DiT, as a pipeline of diffusers.

    pipeline = DiffusionPipeline.from_pretrained(DIR, trust_remote_code=True)
    images = pipeline([1, 7], guidance_scale=4.0, generator=torch.Generator().manual_seed(0)).images

Guidance acts on all channels of the noise. The log variance is that of the class.
"""

import numpy as np
import torch
from diffusers import DDPMScheduler, DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class MoHDiTPipeline(DiffusionPipeline):
    """transformer: a ``MoHDiTModel``. vae: an ``AutoencoderKL``, or None if the model draws pixels."""

    _optional_components = ["vae"]

    def __init__(self, transformer, scheduler, vae=None):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)

    @torch.no_grad()
    def __call__(
        self, class_labels, guidance_scale=None, num_inference_steps=250, generator=None, latents=None,
        output_type="pil",
    ):  # fmt: skip
        """Generate images of ``class_labels``, a list of numbers. guidance_scale: 1 means none; default 4, or 1 for a
        model trained with --class-dropout 0, which refuses others. latents: initial noise, [b, c, H, W]. output_type:
        pil; np, [b, H, W, c] from 0 to 1; or latent, the output of the model."""
        config, device = self.transformer.config, self._execution_device
        if guidance_scale is None:
            guidance_scale = 4.0 if config.class_dropout else 1.0
        elif guidance_scale != 1 and not config.class_dropout:
            text = "guidance compares with images of no class, which --class-dropout 0 never trains"
            raise ValueError(f"guidance_scale {guidance_scale:g}: {text}; give 1")
        if self.vae is None and config.in_channels not in (1, 3) and output_type != "latent":
            text = f"the model draws latents of {config.in_channels} channels, and no vae is there to decode them"
            raise ValueError(f'{text}; load the pipeline with vae=, an AutoencoderKL, or give output_type="latent"')
        labels = torch.as_tensor(class_labels, device=device).flatten()
        if latents is None:
            shape = len(labels), config.in_channels, config.input_size, config.input_size
            latents = randn_tensor(shape, generator=generator, device=device)
        self.set_timesteps(num_inference_steps, device)
        self.check_order()
        for step in self.progress_bar(self.scheduler.timesteps):
            output = self.predict(latents, step, labels, guidance_scale)
            latents = self.scheduler.step(output, step, latents, generator=generator).prev_sample
        if output_type == "latent":
            return ImagePipelineOutput(images=latents)
        if self.vae is not None:
            latents = latents / self.vae.config.scaling_factor
            latents = self.vae.decode(latents.to(self.vae.dtype)).sample
        images = (latents.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(images) if output_type == "pil" else images)

    def set_timesteps(self, count, device):
        """Choose ``count`` steps as DiT's code does, which rounds other halves up than a DDPMScheduler."""
        scheduler = self.scheduler
        last = scheduler.config.num_train_timesteps - 1
        spaced = getattr(scheduler.config, "timestep_spacing", None) == "linspace"
        if isinstance(scheduler, DDPMScheduler) and spaced and 1 < count <= last + 1:
            steps = np.append(0.0, np.full(count - 1, last / (count - 1))).cumsum().round().astype(int)
            scheduler.set_timesteps(timesteps=steps[::-1].tolist(), device=device)
        else:
            scheduler.set_timesteps(count, device=device)

    def check_order(self):
        """Raise ValueError if the scheduler takes a step that is not in its list for the next one: the DDPMScheduler
        of diffusers before 0.32 does so, and then draws other images."""
        following, steps = getattr(self.scheduler, "previous_timestep", None), self.scheduler.timesteps.tolist()
        if following and [int(following(step)) for step in steps[:-1]] != steps[1:]:
            text = "the scheduler of this diffusers skips other steps than it lists"
            raise ValueError(f"{text}; update it to 0.32 or newer")

    def predict(self, latents, step, labels, guidance_scale):
        """Return noise and range [b, 2c, H, W], with guidance."""
        if guidance_scale == 1:
            return self.transformer(latents, step.expand(len(labels)), labels).to(latents.dtype)
        classes = torch.cat((labels, torch.full_like(labels, self.transformer.config.num_classes)))
        output = self.transformer(latents.repeat(2, 1, 1, 1), step.expand(len(classes)), classes).to(latents.dtype)
        (noise, free), (ranges, _) = (part.chunk(2) for part in output.chunk(2, dim=1))
        return torch.cat((free + guidance_scale * (noise - free), ranges), dim=1)
