"""Statistics of the heads that tokens of held-out images select.

These are the figures of the paper (arXiv 2410.11842, Fig. 3 to 6). A ViT reads each image once. A DiT reads it at ten
steps, one of each tenth of the schedule, which the images together cover evenly; its noise follows from the seed of the
run and the number of the image. With u_in the share of the tokens of image n that use head i, its mean over the steps:

    load        of a head: the mean of u_in over the images of a class, or of all; by tenths over these steps; 1 for
                shared heads
    gate        mean over the tokens that use the head; gate_rms their root mean square
    entropy     of the loads of routed heads, as in docs/monitoring.md
    difference  sqrt(mean over routed i of V_i), V_i = variance over classes of their load - v_i mean of 1 / n_c, where
                v_i is the variance of u_in within classes and n_c the images of class c. The second term removes the
                variance that comes from having few images of a class

Shapes: N images of C classes, P passes over each (1 for a ViT), h heads, the shared ones first.
"""

from functools import partial
from itertools import pairwise, zip_longest

import numpy as np
import torch
from tqdm import tqdm

from moh_lm.data.files import ShardError
from moh_lm.model.block import modules_of
from moh_lm.model.router import HeadRouter
from moh_lm.monitor.head_load import entropy
from moh_lm.vision.diffusion import image_noise
from moh_lm.vision.images import order
from moh_lm.vision.loader import IN_ORDER, ImageSet
from tools.heads.measures import ratio

TENTHS = 10


def report_of(config, model, source, classes, number, batch_size):
    """The content of heads.json: overall values, and for each key of ``figures`` the values of the layers with routed
    heads."""
    dataset, indices = ImageSet(config, source, source), choose(source.labels, classes, number)
    labels = source.labels[indices]
    layers = [
        figures(router.layer, labels, classes, *found)
        for router, *found in measure(config, model, dataset, indices, batch_size)
    ]
    return {
        "images": len(indices),
        "labels": classes,
        "classes": [source.classes[label] for label in classes],
        "class_images": [int((labels == label).sum()) for label in classes],
        "steps": [[first, end - 1] for first, end in tenths(config)],
        **{key: [layer[key] for layer in layers] for key in layers[0]},
    }


def choose(labels, classes, number):
    """Numbers of at most ``number`` images: one of each class in turn, then another one, and so on."""
    mixed = order(IN_ORDER, 0, len(labels))
    turns = zip_longest(*(mixed[labels[mixed] == label] for label in classes))
    return np.array([index for turn in turns for index in turn if index is not None][:number])


def tenths(config):
    """The first step of each tenth of the schedule, and its end; nothing for a ViT."""
    if config.kind == "vit":
        return []
    return list(pairwise(-(-part * config.model.diffusion_steps // TENTHS) for part in range(TENTHS + 1)))


@torch.no_grad()
def measure(config, model, dataset, indices, batch_size):
    """(router, shares of tokens that use each head [N, P, h], means of gates and of their squares [2, h]) of each."""
    routers = [router for router in modules_of(model, HeadRouter) if router.layer.num_routed]
    passes = len(tenths(config)) or 1
    shares, gates = [[] for _ in routers], [0.0] * len(routers)

    def keep(number, router, _, routing):
        shares[number].append(router.heads_in_use(routing.selection).mean(0))
        found = routing.gates.double()
        gates[number] += torch.stack((found, found.square())).mean(1).sum(1)

    hooks = [router.register_forward_hook(partial(keep, number)) for number, router in enumerate(routers)]
    for first in tqdm(range(0, len(indices), batch_size), desc="images", unit="batch", disable=None):
        read(config, model, dataset, indices, slice(first, first + batch_size))
    for hook in hooks:
        hook.remove()
    for router, parts, sums in zip(routers, shares, gates, strict=True):
        batches = [torch.stack(parts[i : i + passes], dim=1) for i in range(0, len(parts), passes)]  # [b, P, h] each
        yield router, torch.cat(batches).double().cpu().numpy(), (sums / len(indices) / passes).cpu().numpy()


def read(config, model, dataset, indices, part):
    """Run the model on the images of a batch, in as many passes as each needs."""
    batch = dataset.samples[dataset.held_out_request(indices[part])]
    if isinstance(batch, ShardError):
        raise batch
    device = next(model.parameters()).device
    inputs = [tensor.to(device) for tensor in batch.inputs]
    if config.kind == "vit":
        model(inputs[0])
        return
    x, _, y, _ = inputs
    noises = image_noise(config.run.seed, indices[part].tolist(), x.shape[1:], device)
    place = torch.arange(len(indices), device=device)[part]
    for first, end in tenths(config):
        t = first + place * (end - first) // len(indices)
        model.predict(model.diffusion.noised(x, t, next(noises)), t, y)


def figures(layer, labels, classes, shares, gates):
    of_images, routed = shares.mean(1), slice(layer.num_shared, None)
    load = of_images.mean(0)
    return {
        "layer": layer.index,
        "shared": layer.num_shared,
        "active": layer.num_active,
        "entropy": entropy(load[routed]),
        "difference": difference(of_images[:, routed], labels, classes),
        "mean_load": load,
        "load": class_means(of_images, labels, classes),
        "step_load": shares.mean(0),
        "gate": ratio(gates[0], load),
        "gate_rms": np.sqrt(ratio(gates[1], load)),
    }


def class_means(shares, labels, classes):
    """Return the means over the images of each class: [N, h] -> [C, h]."""
    return np.stack([shares[labels == label].mean(0) for label in classes])


def difference(shares, labels, classes):
    """Return how much the load of a head differs between classes; None with a single class or one image per class."""
    free = len(labels) - len(classes)
    if len(classes) == 1 or free == 0:
        return None
    means = class_means(shares, labels, classes)
    within = sum(((shares[labels == label] - mean) ** 2).sum(0) for label, mean in zip(classes, means, strict=True))
    by_chance = within / free * np.mean([1 / (labels == label).sum() for label in classes])
    return float(np.sqrt(max(0.0, (means.var(0, ddof=1) - by_chance).mean())))


def table(report):
    lines = ["layer  heads  shared  selected  entropy  least used  most used  classes differ by"]
    keys = ("layer", "shared", "active", "entropy", "difference", "mean_load")
    for layer, shared, active, even, apart, load in zip(*(report[key] for key in keys), strict=True):
        least, most = (shared + int(find(load[shared:])) for find in (np.argmin, np.argmax))
        extremes = "".join(f"{head:5}:{load[head]:5.0%}" for head in (least, most))
        apart = "-" if apart is None else f"{apart:.1%}"
        chosen = f"{active} of {len(load) - shared}"
        lines.append(f"{layer:5}  {len(load):5}  {shared:6}  {chosen:>8}  {even:7.3f} {extremes}  {apart:>17}")
    return "\n".join(lines)


def plain(array):
    """An array as lists of numbers with six digits, NaN as null."""
    return np.where(np.isnan(array), None, array.round(6)).tolist()
