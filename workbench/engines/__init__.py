"""Real engines: launched in their own interpreter, or watched from outside. The core never imports one."""
