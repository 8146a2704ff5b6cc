"""Import it before Triton kernels run under the interpreter.

Triton 3.6 turns the bounds of a loop, arrays of one element, into integers in a way that NumPy 2.4 refuses.
"""

from typing import Any

from triton.runtime import interpreter

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_and_index(tensor: type, scope: Any) -> None:
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_tensor_and_index
