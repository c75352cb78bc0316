"""Write the model repository of the OCR example: the models beside this file and the networks of an installed package.

Usage: python examples/ocr/make_repository.py FOLDER
"""

import sys
from pathlib import Path

from charonia.demo.ocr import build_ocr

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build_ocr(Path(sys.argv[1]))
    print(f"written; serve it with: charonia serve --model-repository={sys.argv[1]}")
