from pyarrow import BufferReader, Schema, Table

class ColumnChunkMetaData:
    path_in_schema: str
    dictionary_page_offset: int | None
    data_page_offset: int
    total_compressed_size: int
    total_uncompressed_size: int

class RowGroupMetaData:
    num_rows: int
    num_columns: int
    def column(self, number: int) -> ColumnChunkMetaData: ...

class ParquetSchema:
    def to_arrow_schema(self) -> Schema: ...

class FileMetaData:
    num_row_groups: int
    schema: ParquetSchema
    def row_group(self, number: int) -> RowGroupMetaData: ...
    def write_metadata_file(self, path: str) -> None: ...

class ParquetFile:
    def __init__(self, source: BufferReader, *, metadata: FileMetaData) -> None: ...
    def read_row_group(self, number: int, *, columns: list[str] | None) -> Table: ...

def read_metadata(source: str | BufferReader) -> FileMetaData: ...
def read_schema(path: str) -> Schema: ...
def read_table(path: str, *, columns: list[str]) -> Table: ...
