//! The verbs library. It is loaded on first use and kept until the process ends.

use crate::error::{Error, Result};
use crate::sys::*;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// The names under which the library is tried on this system, in this order.
pub(crate) const CANDIDATES: &[&str] = if cfg!(target_os = "macos") {
    &["/usr/lib/librdma.dylib", "librdma.dylib"]
} else {
    &["libibverbs.so.1"]
};

/// Declares the function table and its loading, from one list.
macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// The exported functions that this crate uses. The three on the hot path are in
        /// `ibv_context.ops`.
        pub(crate) struct Library {
            /// The candidate that was loaded.
            pub(crate) path: &'static str,
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Library {
            fn from_loaded(path: &'static str, loaded: &libloading::Library) -> Result<Self> {
                Ok(Self { path, $(
                    // SAFETY: the symbol has this signature in every version of the verbs ABI.
                    $name: unsafe { symbol(path, loaded, stringify!($name))? },
                )* })
            }
        }
    };
}

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: fn(*mut *mut ibv_device) -> ();
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: fn(*mut ibv_context) -> c_int;
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    ibv_query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut c_void, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
    ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
}

/// # Safety
/// `T` must be the type of a pointer to the function called `name`.
unsafe fn symbol<T: Copy>(path: &str, loaded: &libloading::Library, name: &str) -> Result<T> {
    // SAFETY: the caller guarantees the type.
    let found = unsafe { loaded.get::<T>(name) };
    found.map(|symbol| *symbol).map_err(|source| Error::LibraryUnusable {
        path: path.to_string(),
        symbol: name.to_string(),
        reason: source.to_string(),
    })
}

impl Library {
    /// The library, or why it cannot be loaded. Later calls return the first result.
    pub(crate) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
        LIBRARY.get_or_init(|| Self::load(CANDIDATES)).as_ref().map_err(Clone::clone)
    }

    fn load(candidates: &[&'static str]) -> Result<Self> {
        let mut reasons = Vec::new();
        for path in candidates {
            // SAFETY: the library's initializers only register the vendors' providers.
            match unsafe { libloading::Library::new(*path) } {
                Ok(loaded) => {
                    let library = Self::from_loaded(path, &loaded)?;
                    // Never unloaded, because the table's pointers would dangle.
                    std::mem::forget(loaded);
                    return Ok(library);
                }
                Err(source) => reasons.push(reason(&source)),
            }
        }
        Err(Error::LibraryMissing { tried: candidates.join(", "), reason: reasons.join("; ") })
    }
}

/// The loader's message, which libloading's error has as its source.
fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_a_remedy() {
        let error = Library::load(&["libthunder-has-no-such-library.so.7"]).err().expect("it does not exist");
        let text = error.to_string();
        assert!(text.contains("libthunder-has-no-such-library.so.7"), "{text}");
        assert!(text.contains("install"), "{text}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_without_verbs_names_the_missing_function() {
        let error = Library::load(&["libc.so.6"]).err().expect("libc has no verbs");
        assert!(error.to_string().contains("ibv_get_device_list"), "{error}");
    }
}
