"""Quantizes the model that train.py wrote to MLX's 8-bit format and writes the folder model/.

    python3 quantize.py build            # writes model/, with MLX-LM
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm import convert

HERE = Path(__file__).parent
KEPT = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
MOST_BYTES = 14_000_000


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("source", type=Path, help="folder written by train.py")
    p.add_argument("--bits", type=int, default=8)
    p.add_argument("--out", type=Path, default=HERE / "model")
    a = p.parse_args()
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "mlx"
        convert(str(a.source), str(made), quantize=True, q_bits=a.bits, q_group_size=64)
        a.out.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            # The tokenizer's files and the template stay as train.py wrote them, without a
            # converter's additions.
            source = made if name in ("config.json", "model.safetensors") else a.source
            shutil.copyfile(source / name, a.out / name)
    total = sum((a.out / name).stat().st_size for name in KEPT)
    if total > MOST_BYTES:
        raise SystemExit(f"{a.out} takes {total} bytes, more than {MOST_BYTES}: train a smaller shape")
    print(f"{a.out}: {total} bytes")


if __name__ == "__main__":
    main()
