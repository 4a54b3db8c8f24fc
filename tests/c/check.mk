# The ring's headers in C programs under ThreadSanitizer and AddressSanitizer for SECONDS, and its model. The
# model needs spin; without spin, it is not checked.
.PHONY: check-sanitizers check-headers
check-sanitizers: SECONDS ?= 60
check-sanitizers:
	tests/c/run.sh $(SECONDS)
	if command -v spin; then tests/model/run.sh normal; else echo "spin is not installed, so the model is not checked"; fi

# The C headers, as the compilers of other systems see them.
C_FLAGS := -std=c11 -O2 -Wall -Wextra -Werror -Icseq/include
AS_MSVC := -fms-extensions -Wno-builtin-macro-redefined -Wno-unused-function -Wgnu -Wvla \
	-Itests/c/msvc -include as_msvc.h
ZIG_CC = $(PY) -m ziglang cc $(C_FLAGS)
TARGETS := x86_64-windows-gnu aarch64-windows-gnu x86_64-macos aarch64-macos \
	x86_64-linux-gnu aarch64-linux-gnu x86_64-linux-musl aarch64-linux-musl

check-headers: $(VENV)/.dev
	mkdir -p build/cross
	for target in $(TARGETS); do \
		for mode in -UCSEQ_DEBUG -DCSEQ_DEBUG; do \
			$(ZIG_CC) -target $$target $$mode -c tests/c/headers.c -o build/cross/$$target.o || exit 1; \
		done; \
	done
	for machine in x86_64,_M_X64 aarch64,_M_ARM64; do \
		$(ZIG_CC) -target $${machine%,*}-windows-gnu $(AS_MSVC) -D$${machine#*,} \
			-c tests/c/headers.c -o build/cross/$${machine#*,}.o || exit 1; \
	done
