"""Public surface: one file for each name of `import gradwire`. Other modules import from these files."""
