#!/bin/sh
# Make the environment of the IPEX lane: the last intel-extension-for-pytorch and the torch it was built for (about 7 GB).
# usage: scripts/ipex_environment.sh FOLDER
set -eu
folder=${1:?usage: scripts/ipex_environment.sh FOLDER}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet "torch==2.8.0" "intel-extension-for-pytorch==2.8.0" "numpy<2.3" setuptools
"$folder/bin/python" -c "import intel_extension_for_pytorch as ipex; print('IPEX', ipex.__version__)"
