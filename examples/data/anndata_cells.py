"""Single cells: rows of a sparse matrix in an .h5ad file, in blocks."""

import anndata
import numpy as np
import pandas as pd
import scipy.sparse

import cseq

counts = np.random.default_rng(0).poisson(0.1, (600, 50)).astype("float32")
counts[:, 0] = np.arange(600)
kinds = pd.Categorical(np.where(np.arange(600) % 3, "B cell", "T cell"))
about = pd.DataFrame({"kind": kinds}, index=[f"cell {n}" for n in range(600)])
cells = anndata.AnnData(scipy.sparse.csr_matrix(counts), obs=about)
cells.write_h5ad("cells.h5ad")


class Cells:
    def __init__(self):
        self.cells = anndata.read_h5ad("cells.h5ad", backed="r")
        self.kinds = self.cells.obs["kind"].cat.codes.to_numpy("int64")

    def __getitem__(self, indices):
        order = np.argsort(indices)
        rows = np.empty((len(indices), self.cells.n_vars), "float32")
        rows[order] = self.cells.X[indices[order]].toarray()
        return rows, self.kinds[indices]

    def close(self):
        self.cells.file.close()


options = {"order": cseq.Blocks(20, window=10), "batch_size": 250, "seed": 1}
manager = cseq.MPSequence(Cells, 600, out_type="cpu", dtype=None, **options)
with manager.start() as batches:
    for rows, kinds in batches:
        print(rows.shape, bool(((rows[:, 0] % 3 == 0) == (kinds == 1)).all()))
