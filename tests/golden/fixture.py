"""What the makers of golden fixtures share: prompts, the logits that are kept, safetensors files, the command line."""

import argparse
import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np

PROMPT_LENGTHS = (1, 40, 70)
# The last prompt keeps only these positions' logits: around windows and original context lengths,
# and at the end.
LAST_PROMPT_POSITIONS = (0, 15, 16, 31, 32, 63, 64, 69)


def write_safetensors(path: Path, tensors: dict):
    """Writes tensors, (type, shape, bytes), in name order, so that the same input gives the same bytes (MLX's own writer gives
    no order)."""
    header, blobs, offset = {"__metadata__": {"format": "mlx"}}, [], 0
    for name in sorted(tensors):
        dtype, shape, blob = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def generator(name: str, more: int = 0):
    """Random numbers that depend on the case's name only."""
    return np.random.default_rng(zlib.crc32(name.encode()) + more)


def is_after_norm(name: str, names: list) -> bool:
    """True for the norm of what a layer adds to the residual stream. `post_attention_layernorm` is one where there is also one
    after the MLP; elsewhere it comes before the MLP."""
    ends = ("post_self_attn_layernorm.weight", "post_feedforward_layernorm.weight", "post_mlp_layernorm.weight", "post_operator_norm.weight",
            "post_ffn_norm.weight")
    other = name.replace("post_attention_layernorm", "post_feedforward_layernorm")
    return name.endswith(ends) or (name != other and other in names)


def prompts(name: str, vocab: int) -> list:
    """Token sequences of PROMPT_LENGTHS; the longer ones hold the first and the last token of the vocabulary."""
    rng = generator(name, 1)
    sequences = [rng.integers(0, vocab, n).astype(np.int32) for n in PROMPT_LENGTHS]
    for tokens in sequences[1:]:
        tokens[3], tokens[7] = 0, vocab - 1
    return sequences


def write_golden(name: str, vocab: int, forward, folder: Path) -> float:
    """Writes golden.safetensors with the logits, f32 [len, vocab], that `forward` gives for each prompt; returns their mean
    standard deviation."""
    arrays, spread = {}, []
    for i, tokens in enumerate(prompts(name, vocab)):
        logits = forward(tokens)
        assert logits.dtype == np.float32 and np.isfinite(logits).all(), name
        last = i == len(PROMPT_LENGTHS) - 1
        positions = np.array(LAST_PROMPT_POSITIONS if last else range(len(tokens)), np.int32)
        arrays[f"tokens.{i}"], arrays[f"positions.{i}"] = tokens, positions
        arrays[f"logits.{i}"] = logits[positions]
        arrays[f"argmax.{i}"] = logits.argmax(-1).astype(np.int32)
        spread.append(logits.std())
    types = {"float32": "F32", "int32": "I32"}
    tensors = {key: (types[str(array.dtype)], array.shape, array.tobytes()) for key, array in arrays.items()}
    write_safetensors(folder / "golden.safetensors", tensors)
    return float(np.mean(spread))


def main(description: str, cases: dict):
    """Makes the cases that the command line names. `cases` maps a name to its folder's name and to a function that fills the
    folder and returns the logits' standard deviation."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "cases", help="where the folders go")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to make (all, if none is named)")
    args = parser.parse_args()
    unknown = set(args.names) - set(cases)
    if unknown:
        parser.error(f"no case named {', '.join(sorted(unknown))}")
    total = 0
    for name, (folder_name, fill) in cases.items():
        if args.names and name not in args.names:
            continue
        folder = args.out / folder_name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        spread = fill(folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        total += size
        print(f"{name:28} {size / 1000:6.0f} kB   standard deviation {spread:.3g}", flush=True)
    print(f"{total / 1e6:.2f} MB in all")
