"""How every command reads its arguments, and what it does when nobody reads its output."""
