"""What `charonia demo` runs: a repository of real models, real inputs, and what came back."""
