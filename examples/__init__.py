"""Programs that use Charonia as yours would."""
