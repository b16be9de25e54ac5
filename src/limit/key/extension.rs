//! A value in the extensions of the request as the key.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use http::request::Parts;

use super::KeyExtractor;
use crate::name::Name;

/// Extracts a value from the request's extensions, such as the account that authentication inserted.
///
/// The value is an extension of type `T`, or else of `Arc<T>`, `Option<T>` or `Option<Arc<T>>`. It is the key if it
/// is `AsRef<[u8]>`; of any other value, [`by`](Self::by) takes the key. `ExtensionKey<str>` finds an `Arc<str>`.
///
/// See [`key`](crate::limit::ConcurrencyLimitBuilder::key) for a layer that uses it.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use http::Request;
/// use tower_semaphore::limit::{ExtensionKey, KeyExtractor};
///
/// #[derive(Clone)]
/// struct Account { id: u64 }
///
/// // Authentication shares one account between the requests of a connection.
/// let request = Request::builder().extension(Arc::new(Account { id: 42 })).body(()).unwrap();
/// let key = ExtensionKey::by(|account: &Account| Some(account.id.to_string()));
/// assert_eq!(key.extract(&request.into_parts().0), Some("42".into()));
/// ```
pub struct ExtensionKey<T: ?Sized, F = Bytes> {
    key_of: F,
    value: PhantomData<fn() -> Box<T>>,
}

/// The key is the bytes of the value.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Bytes;

impl<T: ?Sized> ExtensionKey<T> {
    /// Extracts the bytes of the extension of type `T`.
    ///
    /// ```
    /// use http::Request;
    /// use tower_semaphore::limit::{ExtensionKey, KeyExtractor};
    ///
    /// let request = Request::builder().extension("acme".to_owned()).body(()).unwrap();
    /// let (parts, ()) = request.into_parts();
    /// assert_eq!(ExtensionKey::<String>::new().extract(&parts), Some("acme".into()));
    /// ```
    #[must_use]
    pub const fn new() -> Self {
        Self { key_of: Bytes, value: PhantomData }
    }
}

impl<T, F> ExtensionKey<T, F> {
    /// Extracts what the closure returns of the extension of type `T`; `None` if it has no key.
    ///
    /// ```
    /// use tower_semaphore::limit::ExtensionKey;
    ///
    /// struct Account { team: Option<String> }
    ///
    /// let team = ExtensionKey::by(|account: &Account| account.team.clone());
    /// ```
    pub const fn by<K>(key_of: F) -> Self
    where
        F: Fn(&T) -> Option<K> + Send + Sync + 'static,
        K: Into<Name>,
    {
        Self { key_of, value: PhantomData }
    }
}

/// The value, whatever shares it or makes it optional.
fn find<T: Send + Sync + 'static>(parts: &Parts) -> Option<&T> {
    let extensions = &parts.extensions;
    extensions
        .get::<T>()
        .or_else(|| extensions.get::<Arc<T>>().map(|value| &**value))
        .or_else(|| extensions.get::<Option<T>>()?.as_ref())
        .or_else(|| extensions.get::<Option<Arc<T>>>()?.as_deref())
}

impl<T: AsRef<[u8]> + Send + Sync + 'static> KeyExtractor for ExtensionKey<T> {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        find::<T>(parts).map(Name::new)
    }
}

impl KeyExtractor for ExtensionKey<str> {
    fn extract(&self, parts: &Parts) -> Option<Name> {
        let shared = parts.extensions.get::<Arc<str>>();
        let text = shared.or_else(|| parts.extensions.get::<Option<Arc<str>>>()?.as_ref())?;
        Some(Name::new(&**text))
    }
}

impl<T, F, K> KeyExtractor for ExtensionKey<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> Option<K> + Send + Sync + 'static,
    K: Into<Name>,
{
    fn extract(&self, parts: &Parts) -> Option<Name> {
        (self.key_of)(find::<T>(parts)?).map(Into::into)
    }
}

impl<T: ?Sized> Default for ExtensionKey<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: ?Sized, F: Clone> Clone for ExtensionKey<T, F> {
    fn clone(&self) -> Self {
        Self { key_of: self.key_of.clone(), value: PhantomData }
    }
}

impl<T: ?Sized, F: Copy> Copy for ExtensionKey<T, F> {}

impl<T: ?Sized, F> fmt::Debug for ExtensionKey<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExtensionKey<{}>", std::any::type_name::<T>())
    }
}
