"""The accuracy gate: parity by layer, a task metric on labelled data, finite outputs, and which step broke them."""
