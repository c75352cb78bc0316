"""Side-by-side measurements of Charonia and its peers. `README.md` says how to run and read them."""
