"""The parts that every report is built from: rows, tables, charts, words for numbers, ranking, output files."""
