"""Computes latents for MoH-DiT: an autoencoder encodes each image and its mirror image once.

    python tools/encode_latents.py --images DIR_OR_TAR --vae DIR --image-size 256 --output LATENTS

LATENTS is then a --data-dir for `python -m moh_lm.vision dit` (moh_lm/vision/latents.py describes it). The autoencoder
is an AutoencoderKL in diffusers' form, such as stabilityai/sd-vae-ft-ema. A GPU is used if there is one. Threads read
images a few batches ahead of the encoder. After a stop the same command resumes: latents.partial says how many images
are done and how they were made. Different images, settings or autoencoders are refused.

Exit codes: 0; 1 an image or file cannot be read or written; 2 an argument must be fixed; 130 after Ctrl-C.
"""

import hashlib
import os
import sys
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import RESUMES, output_path, run_file
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, read_json, sha256_of, write_json
from moh_lm.parsing import naming
from moh_lm.units import at_least

AHEAD = 4  # batches that are read before they are encoded
FLUSHED = 50  # batches after which everything is flushed to the disk
WORDS = {"sha256": "image names", "sampled": "image files", "sizes": "image files"}  # facts as words in messages


def main(texts):
    words = {"extra": "vision", "interrupted": RESUMES}
    return run_file(__file__, __doc__, add_flags, run, texts, failures=(ShardError,), **words)


def add_flags(parser):
    parser.add_argument("--images", required=True, metavar="DIR_OR_TAR", help="class folders, in a directory or a tar")
    parser.add_argument("--vae", type=Path, required=True, metavar="DIR", help="directory of an AutoencoderKL of "
                        "diffusers")  # fmt: skip
    parser.add_argument("--image-size", type=at_least(1), required=True, metavar="S", help="side of an image in pixels")
    parser.add_argument("--output", type=output_path, required=True, metavar="LATENTS", help="directory to create")
    parser.add_argument("--batch-size", type=at_least(1), default=32, metavar="N", help="images at a time "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp16", help="precision of the latents "
                        "(default: %(default)s)")  # fmt: skip


def run(arguments):
    from moh_lm.cli.devices import usable_device
    from moh_lm.supervise.run_directory import lock_run_directory
    from moh_lm.vision.images import Images
    from moh_lm.vision.latents import FACTS

    images, output = opened("--images", Images, arguments.images), arguments.output
    for note in images.notes:
        print(f"note: {note}")
    vae = load_vae(arguments.vae, arguments.image_size).to(usable_device(None))
    facts = {
        "images": len(images.labels),
        "classes": images.classes,
        "sha256": images.sha256,
        "sampled": images.sampled,
        "sizes": images.sizes,
        "image_size": arguments.image_size,
        "dtype": arguments.dtype,
        "factor": vae.config.scaling_factor,
        "vae": directory_hash(arguments.vae),
    }
    output.mkdir(parents=True, exist_ok=True)
    complete = (output / FACTS).exists()  # written last; the directory may be read-only by now
    with nullcontext() if complete else lock_run_directory(output, "--output"):
        encode_all(images, vae, output, facts, arguments)


def encode_all(images, vae, output, facts, arguments):
    from tqdm import tqdm

    from moh_lm.vision.latents import PARTIAL

    done = images_done(output, facts)
    if done is None:
        print(f"{output} is complete: {facts['images']:,} images")
        return
    latents = open_latents(output, facts, vae, done)
    with tqdm(total=len(images.labels), initial=done, desc="encoding", unit="image", disable=None) as bar:
        for number, batch in enumerate(batches(images, arguments, done)):
            moments = encode(vae, batch)
            latents[done : done + len(moments)] = moments
            done += len(moments)
            bar.update(len(moments))
            if number % FLUSHED == 0:
                latents.flush()
                write_json(output / PARTIAL, {"done": done, **facts})
    latents.flush()
    finish(output, facts, latents, images.labels)
    print(f"wrote {output}: {done:,} images of {len(images.classes)} classes, {'x'.join(map(str, latents.shape[1:]))}")


def finish(output, facts, latents, labels):
    """Write labels, checksums and, last, the facts."""
    import numpy as np
    from tqdm import tqdm

    from moh_lm.vision.latents import CHECKSUMS, FACTS, LABELS, PARTIAL, content_hash

    rows = tqdm(latents, desc="checksums", unit="image", disable=None)
    checksums = np.array([[zlib.crc32(part) for part in row] for row in rows], dtype=np.uint32)
    np.save(output / LABELS, labels)
    np.save(output / CHECKSUMS, checksums)
    write_json(output / FACTS, {**facts, "content": content_hash(facts, labels, checksums)})
    (output / PARTIAL).unlink(missing_ok=True)


def opened(flag, kind, path):
    """The ``Images`` or ``Latents`` at the path of a flag. Raises ConfigError, whose sentences begin with the flag."""
    try:
        return kind(path)
    except ConfigError as error:
        raise ConfigError([f"{flag} {problem}" for problem in error.problems]) from error


def load_vae(path, image_size):
    """The autoencoder in a directory. Raises ConfigError if there is none, or if it cannot halve the images."""
    from tools.hf.convert.autoencoder import load_autoencoder

    vae = load_autoencoder(path)
    step = 2 ** (len(vae.config.block_out_channels) - 1)
    if image_size % step:
        raise ConfigError([f"--image-size {image_size}: must be a multiple of {step}, by which --vae reduces images"])
    return vae


def directory_hash(path):
    files = sorted(file for file in path.iterdir() if file.is_file())
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


def images_done(output, facts):
    """Return how many images an earlier start has encoded, None if all. Raises ConfigError if that start had different
    inputs or settings, or if other files are in the way."""
    import numpy as np

    from moh_lm.vision.latents import CHECKSUMS, FACTS, LABELS, LATENTS, PARTIAL, Latents

    begun = (output / FACTS).exists() or (output / PARTIAL).exists()
    for path in (output / LATENTS, output / LABELS, output / CHECKSUMS):
        if path.is_symlink() or (path.exists() and not begun):
            what = "a link" if path.is_symlink() else "a file that this program did not write"
            raise ConfigError([f"--output {output}: {path.name} is {what}; move it, or give another directory"])
    for name in (FACTS, PARTIAL):
        if (output / name).exists():
            try:
                found = read_json(output / name)
                done = found.pop("done") if name == PARTIAL else None
                found.pop("content", None)
                if done != 0 and len(np.load(output / LATENTS, mmap_mode="r")) != found["images"]:
                    raise ValueError(f"{LATENTS} has another number of images")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError([f"--output {output}: is damaged ({error}); remove it to encode again"]) from error
            if found != facts:
                other = ", ".join({WORDS.get(key, key): 0 for key in facts if found.get(key) != facts[key]})
                raise ConfigError([f"--output {output}: has latents of other {other}; give another directory"])
            if done is None:
                opened("--output", Latents, output)
            return done
    return 0


def open_latents(output, facts, vae, done):
    """The file of latents, mapped into memory; created unless an earlier start has written images to it. Raises OSError
    if it does not fit on the disk, because a full disk would later kill this process by a signal."""
    import numpy as np

    from moh_lm.vision.latents import LATENTS, PARTIAL

    if done:
        return np.lib.format.open_memmap(output / LATENTS, mode="r+")
    write_json(output / PARTIAL, {"done": 0, **facts})  # from here on the directory belongs to this program
    size = facts["image_size"]
    shape = (facts["images"], *encode(vae, np.zeros((1, 3, size, size), np.float32)).shape[1:])
    dtype = {"fp16": np.float16, "fp32": np.float32}[facts["dtype"]]
    path = output / LATENTS
    latents = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    try:
        with naming(path), open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        path.unlink()
        (output / PARTIAL).unlink()
        raise
    return latents


def batches(images, arguments, first):
    """float32 [b, 3, S, S] of the images from number ``first`` on."""
    import numpy as np

    from moh_lm.vision.latents import center_crop, pixels

    def read(index):
        return pixels(center_crop(images.place(index).read(3), arguments.image_size))

    ahead, count, size = deque(), len(images.labels), arguments.batch_size
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(first, count, size):
            ahead.append(pool.map(read, range(start, min(start + size, count))))
            if len(ahead) > AHEAD:
                yield np.stack([*ahead.popleft()])
        while ahead:
            yield np.stack([*ahead.popleft()])


def encode(vae, batch):
    """Means and logarithms of variances of images [b, 3, S, S] and their mirror images: [b, 2, 2c, s, s], float32."""
    import numpy as np
    import torch

    both = torch.from_numpy(np.stack([batch, batch[..., ::-1]], axis=1)).flatten(0, 1)
    moments = vae.encode(both.to(vae.device)).latent_dist.parameters
    return moments.unflatten(0, (-1, 2)).float().cpu().numpy()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
